"""Frozen encoders run once: what they did to a micro-batch is written down again for all others like it.

A frozen text encoder or VAE does the same to every micro-batch of the same shapes, on every rank and whatever is
trained, and a video's VAE takes longer to run than the model that is rehearsed. So the first call is run and recorded;
others, in this rehearsal or a later one of the process, repeat the record: the same operators on other storages.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from headway.models import BuiltModel
from headway.recipe import Recipe
from headway.rehearse.record import COMPUTE, Access, Allocation, HostRead, Operator
from headway.rehearse.recorder import Recorder
from headway.rehearse.storages import Span
from headway.rehearse.work import tensors_in

KEPT = 16
"""Calls that are remembered, the latest ones."""

Key = tuple[object, ...]


@dataclass(frozen=True)
class _Output:
    """A tensor that a call returns."""

    storage: int
    """As in the operators of its take."""
    elements: int
    """Of the storage."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    values: list[Any] | None
    """None of a fake tensor."""


@dataclass(frozen=True)
class _Take:
    """A call that was recorded. Its storages have numbers of their own: those from outside first."""

    outside: list[Key]
    inside: int
    """How many storages the call made."""
    operators: list[Operator]
    host_reads: list[HostRead]
    """Each of what was issued last before it."""
    allocations: list[Allocation]
    """Operators and events numbered from the beginning of the call; freed at -1: returned."""
    events: int
    result: Any
    """With an ``_Output`` in place of each tensor."""


_takes: OrderedDict[Key, _Take] = OrderedDict()


def repeat_frozen_calls(recipe: Recipe, built: BuiltModel) -> Callable[[Recorder], None]:
    """Let what a Recorder is told of the frozen parts of ``built`` be repeated where it is known already."""

    def begin(recorder: Recorder) -> None:
        if built.frozen is None:
            return
        model = recipe.model
        parts = (model.class_name, model.text_encoders, model.latents, recipe.precision.compute)
        outside = _Outside(recorder, built)
        for name in ("encode", "encode_text"):
            call = _Repeated(getattr(built.frozen, name), (name, repr(parts)), recorder, outside)
            setattr(built.frozen, name, call)

    return begin


class _Outside:
    """What frozen parts find in memory: their parameters and buffers, by name."""

    def __init__(self, recorder: Recorder, built: BuiltModel) -> None:
        assert built.frozen is not None
        parts = dict(built.frozen.encoders) | ({"vae": built.frozen.vae} if built.frozen.vae is not None else {})
        self.by_key: dict[Key, int] = {}
        for part, component in parts.items():
            for tensors in (component.module.named_parameters(), component.module.named_buffers()):
                self.by_key |= {(part, name): recorder.storages.serial(tensor) for name, tensor in tensors}
        self.by_serial = {serial: key for key, serial in self.by_key.items()}


class _Repeated:
    """A method of FrozenParts."""

    def __init__(self, method: Callable[..., Any], key: Key, recorder: Recorder, outside: _Outside) -> None:
        self._method = method
        self._key = key
        self._recorder = recorder
        self._outside = outside

    def __call__(self, *args: Any) -> Any:
        """The method's result."""
        given = {("argument", place): tensor for place, tensor in enumerate(tensors_in(args))}
        key = (*self._key, *(_signature(tensor) for tensor in given.values()))
        serials = {name: self._recorder.storages.serial(tensor) for name, tensor in given.items()}
        if key in _takes:
            _takes.move_to_end(key)
            return _repeat(_takes[key], self._recorder, self._outside.by_key | serials)
        names = self._outside.by_serial | {serial: name for name, serial in serials.items()}
        moment, first = self._recorder.storages.moment(), len(self._recorder.operators)
        reads = len(self._recorder.host_reads)
        result = self._method(*args)
        with self._recorder.silence():
            span = self._recorder.storages.since(moment)
            found = _taken(self._recorder, span, first, self._recorder.host_reads[reads:], names, result)
        if found is not None:
            _takes[key] = found
            if len(_takes) > KEPT:
                _takes.popitem(last=False)
        return result


def _signature(tensor: Tensor) -> Key:
    """Equal for tensors with which a call does the same."""
    values = () if isinstance(tensor, FakeTensor) else tuple(tensor.flatten().tolist())
    return (*tensor.shape, tensor.stride(), tensor.dtype, values)


def _taken(
    recorder: Recorder, span: Span, first: int, reads: list[HostRead], names: Mapping[int, Key], result: Any
) -> _Take | None:
    """The call that is over; None: it did what can't be repeated, such as keeping memory for itself."""
    storages, operators = recorder.storages, recorder.operators[first:]
    frees = sum(allocation.freed_event >= 0 for allocation in span.allocations)
    held = {allocation.storage for allocation in span.allocations if allocation.freed_event < 0}
    returned = {storages.serial(tensor) for tensor in tensors_in(result)}
    in_order = all(o.after == (first + place,) for place, o in enumerate(operators[1:]))
    alone = all(o.lane == COMPUTE and o.collective is None for o in operators)
    in_order &= all(read.before > first and read.after == (read.before - 1,) for read in reads)
    if held != returned or span.events != len(span.allocations) + frees or not (in_order and alone and operators):
        return None
    made = dict.fromkeys(allocation.storage for allocation in span.allocations)
    touched = dict.fromkeys(access.storage for o in operators for access in (*o.reads, *o.writes))
    outside = [serial for serial in touched if serial not in made]
    if any(serial not in names for serial in outside):
        return None
    numbers = {serial: number for number, serial in enumerate([*outside, *made])}
    return _Take(
        outside=[names[serial] for serial in outside],
        inside=len(made),
        operators=[_moved(o, numbers, (), -1, -1) for o in operators],
        host_reads=[_delayed(read, -first) for read in reads],
        allocations=[_shifted(a, numbers[a.storage], -first, -span.first_event) for a in span.allocations],
        events=span.events,
        result=tree_map_only(Tensor, lambda tensor: _output(tensor, numbers[storages.serial(tensor)]), result),
    )


def _output(tensor: Tensor, number: int) -> _Output:
    return _Output(
        storage=number,
        elements=tensor.untyped_storage().nbytes() // tensor.element_size(),
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        values=None if isinstance(tensor, FakeTensor) else tensor.tolist(),
    )


def _repeat(take: _Take, recorder: Recorder, outside: Mapping[Key, int]) -> Any:
    """Write ``take`` down once more, and return what its call returns."""
    storages, where, first = recorder.storages, recorder.where, len(recorder.operators)
    where.now()
    serials = [*(outside[name] for name in take.outside), *storages.new_serials(take.inside)]
    after = recorder.stream_now.after()
    for place, operator in enumerate(take.operators):
        moved = _moved(operator, serials, (first + place - 1,), where.micro_batch, where.stage)
        recorder.operators.append(moved)
    recorder.operators[first].after = tuple(sorted(after))
    recorder.host_reads += [_delayed(read, first) for read in take.host_reads]
    recorder.stream_now.issued(len(recorder.operators) - 1)
    _, first_event = storages.moment()
    again = [_shifted(a, serials[a.storage], first, first_event) for a in take.allocations]
    storages.repeat(again, take.events)
    held = {allocation.storage: allocation for allocation in again}
    bases: dict[int, Tensor] = {}

    def made(output: _Output) -> Tensor:
        if output.storage not in bases:
            bases[output.storage] = _storage_of(output)
            storages.adopt(bases[output.storage], held[serials[output.storage]])
        return bases[output.storage].as_strided(output.size, output.stride, output.offset)

    with recorder.silence():
        return tree_map_only(_Output, made, take.result)


def _storage_of(output: _Output) -> Tensor:
    """A new flat tensor as large as the storage of ``output``."""
    if output.values is None:
        return torch.empty(output.elements, dtype=output.dtype)
    with unset_fake_temporarily():
        base = torch.empty(output.elements, dtype=output.dtype)
        base.as_strided(output.size, output.stride, output.offset).copy_(
            torch.tensor(output.values, dtype=output.dtype)
        )
        return base


def _moved(
    operator: Operator,
    storages: Mapping[int, int] | Sequence[int],
    after: tuple[int, ...],
    micro_batch: int,
    stage: int,
) -> Operator:
    """The same operator elsewhere."""
    found = copy(operator)
    found.after, found.micro_batch, found.stage = after, micro_batch, stage
    found.reads = tuple([Access(storages[access.storage], access.bytes) for access in operator.reads])
    found.writes = tuple([Access(storages[access.storage], access.bytes) for access in operator.writes])
    return found


def _delayed(read: HostRead, operators: int) -> HostRead:
    """The same read so many operators later."""
    return HostRead(read.before + operators, tuple(number + operators for number in read.after), read.reason)


def _shifted(allocation: Allocation, storage: int, operators: int, events: int) -> Allocation:
    """The same allocation elsewhere, so many operators and events later."""
    found = copy(allocation)
    found.storage = storage
    found.allocated_at += operators
    found.allocated_event += events
    if allocation.freed_event >= 0:
        found.freed_at += operators
        found.freed_event += events
    return found
