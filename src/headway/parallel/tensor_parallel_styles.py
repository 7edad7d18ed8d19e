"""What one module does under tensor parallelism: which part of its parameters a rank uses, and where it communicates.

A module keeps its own forward, which sees this rank's part of the parameters. Between blocks every activation is whole,
alike on all ranks, with complete gradients (between the blocks of a decoder with sequence parallelism: split over
tokens), so that pipeline stages, context parallelism and recomputation may cut there.

A part is a shard, Shard(0) of rows or Shard(1) of columns. Where a rank's part is no contiguous shard (packed
projections in one weight, fewer key-value heads than ranks), every rank keeps the weight whole and uses its rows or
columns of it: names, checkpoints and exports stay right in every layout. The price: the weight's memory is not divided,
and the ranks' gradients of it are summed, once a step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from headway.parallel.tensor_parallel_boundaries import Boundary, after, before, shared, summed


@dataclass(frozen=True)
class Part:
    """How a parameter is stored over the ranks, and what of it a module's forward sees."""

    stored: Placement
    gradient: Placement
    dimension: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    """(start, length) along ``dimension``; empty: all that is stored here."""
    hidden: bool = False
    """The forward sees None: the bias of a row division is added after the sum."""

    def seen(self, parameter: Tensor) -> Tensor | None:
        """The local tensor for the forward; its gradient finds its way back to ``parameter``."""
        if self.hidden:
            return None
        if not isinstance(parameter, DTensor):
            raise TypeError("a parameter of tensor parallelism was replaced by an ordinary one")
        local = parameter.to_local(grad_placements=[self.gradient])
        pieces = [local.narrow(self.dimension, start, length) for start, length in self.pieces]
        return local if not pieces else pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dimension)


def shard(dimension: int) -> Part:
    """This rank's share along ``dimension``."""
    return Part(Shard(dimension), Shard(dimension))


def of_whole(dimension: int = 0, pieces: tuple[tuple[int, int], ...] = ()) -> Part:
    """``pieces`` of a parameter that every rank keeps whole; what the ranks find of its gradient is summed."""
    return Part(Replicate(), Partial(), dimension, pieces)


class Division:
    """One application of tensor parallelism over the ranks of ``mesh``. Tied parameters stay one parameter."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        # With the old parameter, which must live as long as its id is to mean it.
        self._stored: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def give(self, module: nn.Module, **parts: Part) -> None:
        """Store the named parameters over the ranks and let the forward of ``module`` see the parts.

        No communication: each rank takes its own from the values it holds, or from meta.
        """
        held = {name: part for name, part in parts.items() if module._parameters.get(name) is not None}
        for name, part in held.items():
            module._parameters[name] = self._store(module._parameters[name], part.stored)
        kind: Any = type(module)
        module.__class__ = _seeing(kind, tuple(held.items()))

    def _store(self, old: Any, placement: Placement) -> nn.Parameter:
        if id(old) not in self._stored:
            tensor = distribute_tensor(old.detach(), self.mesh, [placement], src_data_rank=None)
            self._stored[id(old)] = (old, nn.Parameter(tensor, requires_grad=old.requires_grad))
        return self._stored[id(old)][1]


@functools.cache
def _seeing(kind: Any, parts: tuple[tuple[str, Part], ...]) -> type:
    """A subclass of ``kind`` whose forward sees parts. Equal blocks have equal ones, and so share compiled code."""

    def forward(module: Any, *arguments: Any, **keywords: Any) -> Any:
        whole = module._parameters
        module._parameters = whole | {name: part.seen(whole[name]) for name, part in parts}
        try:
            return kind.forward(module, *arguments, **keywords)
        finally:
            module._parameters = whole

    return with_forward(kind, forward)


def with_forward(kind: Any, forward: Callable[..., Any]) -> type:
    """A subclass of ``kind``, named alike, with another forward. Modules are given it in place: their names stay."""
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def base_of(layer: nn.Module) -> Any:
    """The layer itself, or the one inside an adapter."""
    return layer.base_layer if isinstance(layer, LoraLinear) else layer


def adapters_of(layer: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(A, B) of each adapter: the layer adds B(A(x))."""
    if not isinstance(layer, LoraLinear):
        return []
    return [(layer.lora_A[name], layer.lora_B[name]) for name in layer.lora_A]


class Style:
    """What is done to one module."""

    def obstacle(self, module: Any, size: int) -> str | None:
        """Why ``module`` can't be divided over ``size`` ranks."""
        return None

    def apply(self, module: Any, division: Division) -> None:
        """Change ``module`` in place."""
        raise NotImplementedError


def _indivisible(number: int, what: str, size: int) -> str | None:
    return f"{number} {what} can't be divided by {size}" if number % size else None


def _shares(streams: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """(start, length) of this rank's share of each of several streams that lie end to end."""
    starts = [sum(streams[:index]) for index in range(len(streams))]
    return tuple((start + rank * width // size, width // size) for start, width in zip(starts, streams, strict=True))


@dataclass(frozen=True)
class Column(Style):
    """A linear or convolution whose outputs are divided; its input is whole."""

    def obstacle(self, module: Any, size: int) -> str | None:
        return _indivisible(base_of(module).weight.shape[0], "output features", size)

    def part(self, layer: Any, division: Division) -> Part:
        """What a rank uses of the weight, of the bias and of an adapter's B."""
        return shard(0)

    def apply(self, module: Any, division: Division) -> None:
        part = self.part(module, division)
        division.give(base_of(module), weight=part, bias=part)
        for first, second in adapters_of(module):
            division.give(first, weight=of_whole())  # computed alike on all ranks, used by each for its own outputs
            division.give(second, weight=part)


@dataclass(frozen=True)
class PackedColumn(Column):
    """Outputs of several streams in one weight, each of which is divided."""

    streams: tuple[int, ...]

    def obstacle(self, module: Any, size: int) -> str | None:
        return next(filter(None, (_indivisible(width, "output features", size) for width in self.streams)), None)

    def part(self, layer: Any, division: Division) -> Part:
        return of_whole(0, _shares(self.streams, division.rank, division.size))


@dataclass(frozen=True)
class KeyValueColumn(Column):
    """Keys or values of ``heads`` heads. With fewer heads than ranks, each rank uses the one its queries attend to."""

    heads: int

    def obstacle(self, module: Any, size: int) -> str | None:
        if self.heads % size == 0 or size % self.heads == 0:
            return None
        return f"{self.heads} key-value heads can't be divided by {size}, nor {size} by them"

    def part(self, layer: Any, division: Division) -> Part:
        if self.heads % division.size == 0:
            return shard(0)
        width = base_of(layer).weight.shape[0] // self.heads
        return of_whole(0, ((division.rank * self.heads // division.size * width, width),))


@dataclass(frozen=True)
class GroupedHeads(Style):
    """A decoder's attention: whole query heads on each rank, and ``num_key_value_groups`` of them a key-value head."""

    queries: int
    key_values: int

    def obstacle(self, module: Any, size: int) -> str | None:
        return _indivisible(self.queries, "attention heads", size)

    def apply(self, module: Any, division: Division) -> None:
        if division.size > self.key_values:
            module.num_key_value_groups //= division.size // self.key_values


@dataclass(frozen=True)
class Row(Style):
    """A linear or convolution whose inputs are divided; the ranks' outputs are summed at ``leave``, the bias added."""

    leave: Boundary = summed

    def obstacle(self, module: Any, size: int) -> str | None:
        return _indivisible(base_of(module).weight.shape[1], "input features", size)

    def part(self, layer: Any, division: Division) -> Part:
        """What a rank uses of the weight and of an adapter's A."""
        return shard(1)

    def apply(self, module: Any, division: Division) -> None:
        part = self.part(module, division)
        # Over all tokens each rank finds the bias's whole gradient, over its own tokens a part of it.
        gradient: Placement = Replicate() if self.leave is summed else Partial()
        division.give(base_of(module), weight=part, bias=Part(Replicate(), gradient, hidden=True))
        for first, second in adapters_of(module):
            division.give(first, weight=part)
            division.give(second, weight=of_whole())  # B is linear: it may come before the sum, and needs none itself
        bias = Part(Replicate(), gradient)
        module.register_forward_hook(functools.partial(_sum_up, leave=self.leave, bias=bias, mesh=division.mesh))


def _sum_up(layer: Any, args: Any, output: Tensor, *, leave: Boundary, bias: Part, mesh: DeviceMesh) -> Tensor:
    whole = leave(output, mesh)
    parameter = base_of(layer)._parameters["bias"]
    added = None if parameter is None else bias.seen(parameter)
    return whole if added is None else whole + added


@dataclass(frozen=True)
class PackedRow(Row):
    """Inputs of several streams end to end, each of which is divided."""

    streams: tuple[int, ...] = ()

    def obstacle(self, module: Any, size: int) -> str | None:
        return next(filter(None, (_indivisible(width, "input features", size) for width in self.streams)), None)

    def part(self, layer: Any, division: Division) -> Part:
        return of_whole(1, _shares(self.streams, division.rank, division.size))


@dataclass(frozen=True)
class PartialGradients(Style):
    """A norm of which each rank sees only some rows (heads, tokens): alike on all ranks, its gradient is their sum."""

    def apply(self, module: Any, division: Division) -> None:
        division.give(module, **{name: of_whole() for name in module._parameters})


@dataclass(frozen=True)
class NormAcrossHeads(Style):
    """A root-mean-square norm over the channels of all heads: one number a token is summed over the ranks."""

    def apply(self, module: Any, division: Division) -> None:
        kind: Any = type(module)
        module.__class__ = _across_heads(kind)
        module.tensor_parallel_mesh = division.mesh
        division.give(module, weight=shard(0))


@functools.cache
def _across_heads(kind: Any) -> type:
    def forward(norm: Any, states: Tensor) -> Tensor:
        mesh = norm.tensor_parallel_mesh
        wide = states.float()
        squares = summed(wide.square().sum(-1, keepdim=True), mesh)
        # What each rank computes from the sum is a part of the sum's gradient.
        mean = shared(squares, mesh) / (states.shape[-1] * mesh.size())
        return (wide * torch.rsqrt(mean + norm.eps) * norm.weight).type_as(states)

    return with_forward(kind, forward)


@dataclass(frozen=True)
class Count(Style):
    """An attribute that counts what is divided, where the library's own code reads it."""

    attribute: str
    what: str

    def obstacle(self, module: Any, size: int) -> str | None:
        return _indivisible(getattr(module, self.attribute), self.what, size)

    def apply(self, module: Any, division: Division) -> None:
        setattr(module, self.attribute, getattr(module, self.attribute) // division.size)


@dataclass(frozen=True)
class Enter(Style):
    """A boundary before a module: at its first argument, and at those named in ``others``."""

    boundary: Boundary
    others: tuple[str, ...] = ()

    def apply(self, module: Any, division: Division) -> None:
        before(module, self.boundary, division.mesh, self.others)


@dataclass(frozen=True)
class Exit(Style):
    """A boundary after a module: at its output, or the first of several."""

    boundary: Boundary

    def apply(self, module: Any, division: Division) -> None:
        after(module, self.boundary, division.mesh)
