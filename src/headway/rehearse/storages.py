"""Memory: which storage is held from when to when, and what for."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.rehearse.record import BEFORE, Access, Allocation, Category, Operator, Phase

PASSES = ("backward", "recompute")
"""Phases of a backward pass."""


@dataclass(slots=True)
class _Held:
    """A storage that is alive."""

    serial: int
    allocation: Allocation | None
    """None while it is empty."""
    phase: Phase
    micro_batch: int


@dataclass(frozen=True)
class Span:
    """What happened from some moment on."""

    allocations: list[Allocation]
    """That were made; ``freed_event`` below 0: still held."""
    first_event: int
    events: int


class Storages:
    """Serial numbers of storages on first sight, and their allocations.

    ``position`` gives the number of the operator that is issued next, ``here`` (phase, module, lane, micro-batch).
    """

    def __init__(self, position: Callable[[], int], here: Callable[[], tuple[Phase, str, str, int]]) -> None:
        self._position = position
        self._here = here
        self._alive: dict[int, _Held] = {}
        self._born: list[tuple[Allocation, Phase, int]] = []
        self._events = 0
        self._serials = 0
        self._started = False

    def allocations(self, operators: list[Operator]) -> list[Allocation]:
        """All that was held, what was made in passes named by how long it stayed. To be called once, at the end."""
        for held in list(self._alive.values()):
            if held.allocation is not None:
                held.allocation.stays = True
                held.allocation.freed_at = len(operators)
                held.allocation.freed_event = self._events
        for allocation, phase, micro_batch in self._born:
            if allocation.category == "temporary":
                allocation.category = by_life(allocation, phase, micro_batch, operators)
        return [allocation for allocation, _, _ in self._born]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow frees and changes of size of storages inside the context. FSDP2 frees and refills by resizing."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            held = self._alive.get(id(storage))
            if held is not None:
                self._end(held)
                if size:
                    held.allocation = self._begin(held.serial, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        self._started = True
        try:
            yield
        finally:
            self._started = False
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def name(self, tensor: Tensor, category: Category, module: str | None = None) -> None:
        """Say what ``tensor`` is held for, and whose it is."""
        allocation = self._held(_local(tensor)).allocation
        if allocation is not None:
            allocation.category = category
            if module is not None:
                allocation.module = module

    def communicates(self, tensor: Tensor) -> None:
        """A collective reads or writes ``tensor``: unless it is held for something else, it is held for that."""
        allocation = self._held(tensor).allocation
        if allocation is not None and allocation.category == "temporary":
            allocation.category = "communication"

    def owner(self, tensor: Tensor) -> str:
        """The module or parameter that ``tensor`` is held for."""
        allocation = self._held(tensor).allocation
        return "" if allocation is None else allocation.module

    def access(self, tensor: Tensor, size: int) -> Access:
        """``size`` bytes of the storage of ``tensor``."""
        return Access(self._held(tensor).serial, size)

    def serial(self, tensor: Tensor) -> int:
        """Number of the storage of ``tensor``."""
        return self._held(_local(tensor)).serial

    def moment(self) -> tuple[int, int]:
        """Now, for ``since``."""
        return len(self._born), self._events

    def since(self, moment: tuple[int, int]) -> Span:
        """What happened from ``moment`` on."""
        born, event = moment
        return Span([allocation for allocation, _, _ in self._born[born:]], event, self._events - event)

    def new_serials(self, count: int) -> range:
        """Numbers of storages that are to be told by ``repeat``."""
        self._serials += count
        return range(self._serials - count, self._serials)

    def repeat(self, allocations: Iterable[Allocation], events: int) -> None:
        """``allocations`` happen, in ``events`` events from the present one on."""
        phase, _, _, micro_batch = self._here()
        self._born += [(allocation, phase, micro_batch) for allocation in allocations]
        self._events += events

    def adopt(self, tensor: Tensor, allocation: Allocation) -> None:
        """The storage of ``tensor``, which nothing has seen yet, is what ``allocation`` made."""
        phase, _, _, micro_batch = self._here()
        self._follow(tensor.untyped_storage(), _Held(allocation.storage, allocation, phase, micro_batch))

    def see(self, tensor: Tensor) -> None:
        """``tensor`` may be new."""
        self._held(tensor)

    def _held(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        key = id(storage)
        held = self._alive.get(key)
        if held is None:
            phase, _, _, micro_batch = self._here()
            held = _Held(self._serials, None, phase, micro_batch)
            self._serials += 1
            size = storage.nbytes()
            if size:
                held.allocation = self._begin(held.serial, size)
            self._follow(storage, held)
        return held

    def _follow(self, storage: torch.UntypedStorage, held: _Held) -> None:
        """Until the last reference to ``storage`` goes."""
        self._alive[id(storage)] = held
        weakref.finalize(storage, self._gone, id(storage)).atexit = False

    def _begin(self, serial: int, size: int) -> Allocation:
        phase, module, lane, micro_batch = self._here()
        event, position = (self._events, self._position()) if self._started else (BEFORE, BEFORE)
        if self._started:
            self._events += 1
        allocation = Allocation(serial, size, "temporary", lane, module, position, -1, event, -1, False)
        self._born.append((allocation, phase, micro_batch))
        return allocation

    def _gone(self, key: int) -> None:
        self._end(self._alive.pop(key))

    def _end(self, held: _Held) -> None:
        allocation, held.allocation = held.allocation, None
        if allocation is not None and self._started:
            allocation.freed_at, allocation.freed_event = self._position(), self._events
            self._events += 1


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def by_life(allocation: Allocation, phase: Phase, micro_batch: int, operators: list[Operator]) -> Category:
    """What unnamed memory was held for, by what was issued last before it was freed."""
    number = min(allocation.freed_at, len(operators)) - 1
    while number and (collective := operators[number].collective) is not None and collective.peer >= 0:
        number -= 1  # messages between stages are of no pass
    last = operators[number]
    if phase == "forward" and last.phase != "forward":
        return "activation"
    if phase == "recompute" and last.phase == "backward":
        return "recomputed"
    if phase == "backward" and (last.phase not in PASSES or last.micro_batch != micro_batch):
        # What outlives the backward pass that made it is a sum of gradients.
        return "gradient"
    return "temporary"
