"""What must be known of a model class to cut it into stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from headway.parallel.pipeline.stand_ins import Blank, Passage, Received, Skipped


class Edge(NamedTuple):
    """The shape of a tensor that travels between two stages, in the compute dtype."""

    shape: tuple[int, ...]
    tokens: int | None = None
    """The dimension of tokens, which is shorter on each rank where sequences are split over ranks."""


EdgesOf = Callable[[Any, Mapping[str, Any]], tuple[Edge, ...]]
"""(the model's config, the arguments of its forward by name) -> what travels between any two of its stages."""


@dataclass(frozen=True)
class StageRecipe:
    """How a model class is cut. Paths are relative to the model."""

    blocks: tuple[str, ...]
    """Module lists that make up the sequence of blocks, in order."""
    returns: tuple[str, ...]
    """Names of what each block returns, as the arguments of the next one are called."""
    travels: tuple[str, ...]
    """Names of what goes from stage to stage, in the order of ``edges``: arguments of blocks, or ``noted``."""
    entry: Mapping[str, Callable[[Passage, Any], nn.Module]]
    """Modules of the first stage -> what makes a stand-in for them on the others, given the module itself."""
    exit: tuple[str, ...]
    """Modules and parameters of the last stage."""
    edges: EdgesOf
    noted: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Modules of the first stage whose results travel although no block takes them -> names of those results."""
    first_blocks: int = 1
    """Blocks that the first stage must have: those that take what only it computes."""


def received(*names: str | None) -> Callable[[Passage, Any], nn.Module]:
    """Stands in with the named tensors that came from the stage before."""
    return lambda passage, module: Received(passage, names)


def blank(like: str) -> Callable[[Passage, Any], nn.Module]:
    """Stands in for a token embedding of the width of the named tensor."""
    return lambda passage, module: Blank(passage, like)


def skipped(passage: Passage, module: Any) -> nn.Module:
    """Stands in by handing on its first argument."""
    return Skipped()
