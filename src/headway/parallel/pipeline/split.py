"""A model on meta -> this rank's stages, each a copy in which stand-ins take the place of other stages' modules."""

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.parallel.pipeline.families import Pipelined, find_pipelined
from headway.parallel.pipeline.plan import PipelinePlan
from headway.parallel.pipeline.recipe import Edge, StageRecipe
from headway.parallel.pipeline.stand_ins import Leave, Passage, Received, Skipped, StandIn, note_results

Predict = Callable[[nn.Module, Any], Tensor]
"""(model, micro-batch) -> the model's output; calls the model once. Only the last stage returns from that call."""


@dataclass
class Stage:
    """A stage on this rank."""

    index: int
    count: int
    module: nn.Module
    """A copy of the whole module, with the same names; trains what this stage owns."""
    passage: Passage
    travels: tuple[str, ...]
    """Names of the tensors that come in (except on the first stage) and go out (except on the last)."""
    gradients_in: bool
    """Whether gradients go back to the stage before: something before this stage trains."""
    gradients_out: bool
    """Whether gradients come back from the next stage: something up to this stage trains."""

    @property
    def is_first(self) -> bool:
        """Whether micro-batches begin here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    def own(self, paths: Iterable[str]) -> list[tuple[str, nn.Module]]:
        """Those modules among ``paths`` of the whole module that this stage has itself, with their paths."""
        here = {path: child for path, child in self.module.named_modules() if not isinstance(child, StandIn)}
        return [(path, here[path]) for path in paths if path in here]


class Shared(NamedTuple):
    """A parameter that two stages use: the earlier one trains it, the later one computes with a copy."""

    owner: int
    owner_name: str
    user: int
    user_name: str
    trains: bool


@dataclass
class Split:
    """A model cut for one rank of the pipeline."""

    plan: PipelinePlan
    rank: int
    stages: list[Stage]
    shared: list[Shared]
    """Of all ranks."""
    edges: "EdgeShapes"


class _Called(Exception):  # noqa: N818 - no error
    """Carries the arguments of a call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.arguments = arguments


@dataclass
class EdgeShapes:
    """What travels between stages for a micro-batch: known on every rank without asking another one.

    A copy of the module on meta is called with the micro-batch, as far as to the library's model, whose arguments tell
    the shapes.
    """

    skeleton: nn.Module
    model: Any
    recipe: StageRecipe
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.model.forward)
        self.model.forward = self._called

    def _called(self, *arguments: Any, **keywords: Any) -> None:
        raise _Called(dict(self.signature.bind(*arguments, **keywords).arguments))

    def __call__(self, predict: Predict, batch: Any) -> tuple[Edge, ...]:
        """In the order of ``Stage.travels``."""
        try:
            with torch.no_grad():
                predict(self.skeleton, batch)
        except _Called as called:
            return self.recipe.edges(self.model.config, called.arguments)
        raise TypeError("predict returned without having called the model that is cut into stages")


def split_into_stages(module: nn.Module, plan: PipelinePlan, rank: int) -> Split:
    """The stages of ``rank`` of the pipeline.

    ``module`` is left as it is, on meta or not. To be called before anything in it is wrapped, replaced or sharded.
    """
    pipelined = find_pipelined(module)
    names = [_names(pipelined, plan, stage) for stage in range(plan.stages)]
    trains = [
        any(p.requires_grad and _is_under(name, own) for name, p in pipelined.model.named_parameters()) for own in names
    ]
    stages = []
    for index in plan.stages_of(rank):
        passage = Passage()
        part = _part(module, pipelined, plan, index, passage)
        before, after = any(trains[:index]), any(trains[: index + 1])
        stages.append(Stage(index, plan.stages, part, passage, pipelined.recipe.travels, before, after))
    skeleton = copy.deepcopy(module, {id(block): Skipped() for _, block in pipelined.blocks()}).to("meta")
    edges = EdgeShapes(skeleton, skeleton.get_submodule(pipelined.path), pipelined.recipe)
    return Split(plan, rank, stages, _shared(pipelined, names), edges)


def _names(pipelined: Pipelined, plan: PipelinePlan, stage: int) -> tuple[str, ...]:
    """Paths in the model of the modules and parameters that a stage owns."""
    blocks = pipelined.blocks()
    entry = pipelined.recipe.entry if stage == 0 else ()
    exit = pipelined.recipe.exit if stage == plan.stages - 1 else ()
    return (*entry, *(blocks[number][0] for number in plan.blocks_of(stage)), *exit)


def _is_under(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _shared(pipelined: Pipelined, names: list[tuple[str, ...]]) -> list[Shared]:
    """Tied parameters whose places are on different stages."""
    start = f"{pipelined.path}." if pipelined.path else ""
    holders: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for name, parameter in pipelined.model.named_parameters(remove_duplicate=False):
        stage = next(index for index, own in enumerate(names) if _is_under(name, own))
        holders.setdefault(parameter, []).append((stage, f"{start}{name}"))
    shared = []
    for parameter, places in holders.items():
        (owner, owner_name), *others = sorted(places)
        users = {stage: name for stage, name in reversed(others) if stage != owner}
        shared += [Shared(owner, owner_name, user, n, parameter.requires_grad) for user, n in sorted(users.items())]
    return shared


def _part(module: nn.Module, pipelined: Pipelined, plan: PipelinePlan, stage: int, passage: Passage) -> nn.Module:
    """A copy of ``module`` with stand-ins for what ``stage`` does not own."""
    recipe, own = pipelined.recipe, plan.blocks_of(stage)
    instead: dict[int, nn.Module] = {}
    for number, (_, block) in enumerate(pipelined.blocks()):
        if number < own.start:
            instead[id(block)] = Received(passage, recipe.returns)
        elif number >= own.stop:
            instead[id(block)] = Leave(passage, recipe.travels, block)
    part = copy.deepcopy(module, instead)  # takes the stand-ins for copies that it has made already
    model = part.get_submodule(pipelined.path)
    if stage == 0:
        for path, names in recipe.noted.items():
            note_results(model.get_submodule(path), passage, names)
    else:
        for path, stand_in in recipe.entry.items():
            _replace(model, path, partial(stand_in, passage))
    if stage != plan.stages - 1:
        for path in recipe.exit:
            _replace(model, path, lambda module: Skipped())
    return part


def _replace(model: nn.Module, path: str, stand_in: Callable[[Any], nn.Module]) -> None:
    """Put a stand-in in the place of a module; a parameter becomes None, and a module that is None stays so."""
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    old = getattr(owner, name)
    if isinstance(old, nn.Parameter):
        setattr(owner, name, None)
    elif old is not None:
        setattr(owner, name, stand_in(old))
