"""Fused operators put into an unmodified model of diffusers or transformers, in place."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from headway.kernels.fusion.attention_diffusion import PATTERNS as ATTENTION_DIFFUSION
from headway.kernels.fusion.attention_language import PATTERNS as ATTENTION_LANGUAGE
from headway.kernels.fusion.diffusion import PATTERNS as DIFFUSION
from headway.kernels.fusion.feed_forward import PATTERNS as FEED_FORWARD
from headway.kernels.fusion.language import PATTERNS as LANGUAGE
from headway.kernels.fusion.pattern import Pattern, calls_known, code_of

PATTERNS = DIFFUSION + LANGUAGE + FEED_FORWARD + ATTENTION_DIFFUSION + ATTENTION_LANGUAGE
OF_INTEREST = ("Norm", "TransformerBlock", "DecoderLayer", "VisionBlock", "MLP", "GLU", "Experts", "Attention")
"""Words in the names of classes that might be fused, and are told of when they are not."""


class Fused(NamedTuple):
    """A module in which operators stand in for the library's code."""

    path: str
    kind: str
    operators: tuple[str, ...]


class Left(NamedTuple):
    """A module that stays as it was."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Fusion:
    """What was done to a model."""

    fused: tuple[Fused, ...] = ()
    left: tuple[Left, ...] = ()

    def headline(self) -> str:
        """All that was fused in one line."""
        operators = sorted({operator for each in self.fused for operator in each.operators})
        return f"{len(self.fused)} modules have fused operators: {', '.join(operators)}"

    def summary(self) -> list[str]:
        """A line for each kind of module: how many were fused and with what, or left and why."""
        fused = Counter((each.kind, ", ".join(each.operators)) for each in self.fused)
        left = Counter((each.kind, each.reason) for each in self.left)
        return [
            *(f"fused: {count} {kind}: {operators}" for (kind, operators), count in fused.items()),
            *(f"left: {count} {kind}: {reason}" for (kind, reason), count in left.items()),
        ]


def fuse(model: nn.Module, *, divided: bool = False) -> Fusion:
    """Let modules of ``model`` compute with fused operators wherever their code is known; return what was done.

    To be called before a model is divided, sharded or compiled; it may be on meta. Parameters, buffers, their names
    and the modules stay; only the classes of fused modules are replaced by subclasses of the same name. ``divided``:
    tensor parallelism will leave each rank some of the heads; norms across all heads are left as they are then.
    """
    fused: list[Fused] = []
    left: list[Left] = []
    covered: set[str] = set()
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if path in covered:
            continue
        kind = type(module)
        pattern, reason = _pattern_of(module, type(modules[path.rpartition(".")[0]]).__name__, divided)
        if pattern is not None and reason is None:
            pattern.apply(module)
            fused.append(Fused(path, kind.__name__, pattern.operators))
            covered.update(f"{path}.{child}" for child in pattern.covers + pattern.gives_weight)
        elif reason or any(word in kind.__name__ for word in OF_INTEREST):
            left.append(Left(path, kind.__name__, reason or "there is no fused form of it"))
    return Fusion(tuple(fused), tuple(left))


def _pattern_of(module: nn.Module, parent: str, divided: bool) -> tuple[Pattern | None, str | None]:
    """The pattern of a module in one of class ``parent``, and why it can't be applied."""
    kind: Any = type(module)
    named = any(kind.__name__ in pattern.names for pattern in PATTERNS)
    for pattern in PATTERNS:
        owner: Any = type(pattern.owner(module))
        if code_of(owner, pattern.method) in pattern.known and calls_known(owner, pattern.method, pattern.functions):
            if pattern.across_heads and divided:
                return pattern, "it norms across heads that are divided over ranks"
            if pattern.not_within is not None and pattern.not_within in parent:
                return pattern, f"it is within {parent}"
            return pattern, pattern.obstacle(module)
    return None, "its code is not the one that is known here" if named else None
