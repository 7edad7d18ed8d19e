"""What a rank's step holds in memory: the curve, its peak and what holds it, and whether it fits the device."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.cluster import Cluster
from headway.rehearse.allocator import ROUND, Block, CachingAllocator, OutOfMemory
from headway.rehearse.columns import Flags, Integers
from headway.rehearse.program import CPU
from headway.rehearse.record import BEFORE, Allocation
from headway.rehearse.simulate import Ranged, RankTimes

GIB = 2**30
LARGEST_MODULES = 12
"""Modules that are named as holders of the peak."""
ALLOCATED_RANGE = (0.97, 1.06)
"""Bytes that torch's allocator counts over those of the record: workspaces of kernels that no record sees (on CPUs 4 to
12 % were seen, scratch of gloo included); frees that come earlier."""
COMPILED_ACTIVATIONS = 0.7
"""What compiled blocks keep for the backward pass, at least, of what eager ones keep (judgement: the compiler computes
cheap operators again)."""
CONTEXT_BYTES = (0.45 * GIB, 0.30 * GIB, 0.60 * GIB)
"""Of a device's memory, the driver's context and the code of kernels (judgement: 0.3 to 0.6 GiB)."""
COMMUNICATOR_BYTES = (0.15 * GIB, 0.05 * GIB, 0.40 * GIB)
"""Buffers of one NCCL communicator of more than one rank (judgement)."""
USABLE = (0.985, 0.955, 0.995)
"""Of a device's memory as sold, counted as GiB, what programs get: 79.2 of an H100's 80, 140.4 of an H200's 141, 44.4
to 45 of an L40S's 48."""
INTERPRETER_BYTES = (0.55 * GIB, 0.45 * GIB, 0.75 * GIB)
"""Resident memory of a process that trains on the CPU, without its tensors: Python, torch and the model libraries.
Where it was not measured."""
PROBABLE = 1.2816
"""Standard deviations between the middle of a normal distribution and an end of the range that holds four fifths."""
MODULE_OF_NONE = "(outside of modules: the loss)"


@dataclass(frozen=True)
class Holding:
    """What holds a part of the peak."""

    name: str
    bytes: int
    count: int
    """Of allocations."""


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in a step."""

    rank: int
    operator: Integers
    """Of each change of what is held, the operator that is issued next: int64, ``[changes]``."""
    held: Integers
    """Bytes after each change: int64, ``[changes]``."""
    held_by: dict[str, Integers]
    """Category -> bytes after each change; together they are ``held``."""
    before: int
    """Bytes when the step begins."""
    peak_bytes: int
    peak_operator: int
    """The operator that was issued next when the peak was reached."""
    categories: tuple[Holding, ...]
    """What the peak is held for, largest first; all together are the peak."""
    modules: tuple[Holding, ...]
    """The modules that hold most of it, those of all repeated blocks of a class together."""
    reserved_bytes: int
    """That the caching allocator has asked the device for; on the CPU as ``peak_bytes``."""
    peak: Ranged
    """Bytes as the Trainer measures them: allocated by torch; on the CPU resident."""
    needed: Ranged
    """Bytes of the device: reserved, and what is outside of torch's allocator."""
    usable: Ranged | None
    """Bytes of the device that a program gets; None on the CPU, which others use too."""

    @property
    def out_of_memory_probability(self) -> float | None:
        """Chance that ``needed`` is more than ``usable``, both taken as normal with the two halves of their ranges."""
        if self.usable is None:
            return None
        room = self.usable.value - self.needed.value
        if room >= 0:
            ends = (self.needed.high - self.needed.value, self.usable.value - self.usable.low)
        else:
            ends = (self.needed.value - self.needed.low, self.usable.high - self.usable.value)
        deviation = math.hypot(*ends) / PROBABLE
        return 0.5 * math.erfc(room / deviation / math.sqrt(2))


def memory_of(held: Sequence[Allocation], times: RankTimes, cluster: Cluster, *, expandable: bool = False) -> Memory:
    """Memory of a step on a device of ``cluster``.

    ``held``: the ``allocations`` of the record of which ``times`` are. ``expandable``: whether torch's allocator is set
    to expandable segments.
    """
    facts = times.program.facts
    on_host = cluster.accelerator.form == CPU
    asked = np.array([allocation.bytes for allocation in held], dtype=np.int64)
    sizes = asked if on_host else -(-asked // ROUND) * ROUND
    changes, operator, event, whose = _changes(held, sizes)
    was_there = np.array([allocation.allocated_event == BEFORE for allocation in held], dtype=bool)
    before = int(sizes[was_there].sum())
    curve = before + np.cumsum(changes)
    highest = int(np.argmax(curve)) if len(curve) else -1
    peak, at = (int(curve[highest]), int(event[highest])) if highest >= 0 and curve[highest] > before else (before, -1)
    there = np.array([a.allocated_event <= at and (a.stays or a.freed_event > at) for a in held], dtype=bool)
    categories = _holdings([allocation.category for allocation in held], sizes, there)
    activations = sum(holding.bytes for holding in categories if holding.name == "activation")
    kept = COMPILED_ACTIVATIONS if facts.compiled else 1.0
    low = ALLOCATED_RANGE[0] * (peak - (1 - kept) * activations)
    allocated = Ranged(float(peak), low, ALLOCATED_RANGE[1] * peak)
    if on_host:
        own = _process_of(cluster)
        reserved, usable = peak, None
        allocated = needed = Ranged(*(getattr(own, end) + getattr(allocated, end) for end in ("value", "low", "high")))
    else:
        reserved, needed, usable = _on_device(held, times, cluster, allocated, expandable)
    owner = _owners({allocation.module for allocation in held}, facts.blocks)
    return Memory(
        rank=facts.rank,
        operator=operator,
        held=curve,
        held_by=_by_category(held, sizes, was_there, changes, whose),
        before=before,
        peak_bytes=peak,
        peak_operator=int(operator[highest]) if at >= 0 else 0,
        categories=categories,
        modules=_holdings([owner[allocation.module] for allocation in held], sizes, there)[:LARGEST_MODULES],
        reserved_bytes=reserved,
        peak=allocated,
        needed=needed,
        usable=usable,
    )


def _process_of(cluster: Cluster) -> Ranged:
    """Bytes of a process without its tensors."""
    measured = cluster.achieved.host.process_gib
    if measured is None:
        return Ranged(*INTERPRETER_BYTES)
    return Ranged(measured.value, measured.low, measured.high).scaled(GIB)


def _changes(held: Sequence[Allocation], sizes: Integers) -> tuple[Integers, Integers, Integers, Integers]:
    """Bytes more or less, operator issued next, event and allocation of each change, in the order of the host."""
    made = [place for place, one in enumerate(held) if one.allocated_event != BEFORE]
    freed = [place for place, one in enumerate(held) if not one.stays]
    event = np.array([held[n].allocated_event for n in made] + [held[n].freed_event for n in freed], dtype=np.int64)
    operator = np.array([held[n].allocated_at for n in made] + [held[n].freed_at for n in freed], dtype=np.int64)
    order = np.argsort(event)
    change = np.concatenate([sizes[made], -sizes[freed]])
    return change[order], operator[order], event[order], np.array(made + freed, dtype=np.int64)[order]


def _by_category(
    held: Sequence[Allocation], sizes: Integers, was_there: Flags, changes: Integers, whose: Integers
) -> dict[str, Integers]:
    """Bytes of each category after each change."""
    names = sorted({one.category for one in held})
    category = np.array([names.index(one.category) for one in held], dtype=np.int64)
    return {
        name: int(sizes[was_there & (category == place)].sum())
        + np.cumsum(np.where(category[whose] == place, changes, 0))
        for place, name in enumerate(names)
    }


def _holdings(names: list[str], sizes: Integers, there: Flags) -> tuple[Holding, ...]:
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for place in np.flatnonzero(there).tolist():
        total[names[place]] += int(sizes[place])
        count[names[place]] += 1
    return tuple(Holding(name, size, count[name]) for name, size in total.most_common())


def _owners(modules: set[str], blocks: Mapping[str, str]) -> dict[str, str]:
    """Each module or parameter by its outermost two names; within a repeated block by the block's class and those
    inside of it, so that all blocks count together."""
    found = {}
    for module in modules:
        parts = module.split(".")
        ends = (end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in blocks)
        end = next(ends, 0)
        inside = ".".join(parts[end : end + 2])
        name = ": ".join(filter(None, (blocks[".".join(parts[:end])], inside))) if end else inside
        found[module] = name or MODULE_OF_NONE
    return found


def _on_device(
    held: Sequence[Allocation], times: RankTimes, cluster: Cluster, allocated: Ranged, expandable: bool
) -> tuple[int, Ranged, Ranged]:
    """Bytes reserved, and ranges of what the device must have and of what it has."""
    history = _History(held, times, expandable)
    reserved = history.play(None)
    assert reserved is not None
    context, communicator = Ranged(*CONTEXT_BYTES), Ranged(*COMMUNICATOR_BYTES)
    columns = times.program.columns
    talking = {columns.texts[place] for place in np.unique(columns.group[columns.communicates]).tolist()}
    several = sum(times.program.groups[group].size > 1 for group in talking)
    outside = Ranged(
        *(getattr(context, end) + several * getattr(communicator, end) for end in ("value", "low", "high"))
    )
    usable = Ranged(*USABLE).scaled(cluster.accelerator.memory_gb * GIB)
    suffices = float(reserved)
    if reserved + outside.high > usable.low:
        suffices = history.least_limit(int(allocated.value), reserved)
    needed = Ranged(
        suffices + outside.value,
        allocated.low + outside.low,
        reserved + outside.high + allocated.high - allocated.value,
    )
    return reserved, needed, usable


class _History:
    """What the allocator is asked for from the first step on: optimizer states come after the first passes."""

    def __init__(self, held: Sequence[Allocation], times: RankTimes, expandable: bool) -> None:
        self._held = held
        self._expandable = expandable
        columns = times.program.columns
        updates = columns.phase == columns.strings.get("optimizer", -1)
        self._updates = int(np.argmax(updates)) if updates.any() else 0
        events = [(one.allocated_event, place) for place, one in enumerate(self._held)]
        events += [(one.freed_event, -place - 1) for place, one in enumerate(self._held) if not one.stays]
        self._events = [place for event, place in sorted(events) if event != BEFORE]

    def play(self, limit: int | None) -> int | None:
        """Bytes reserved by the end of the second step; None: out of memory under ``limit``."""
        allocator = CachingAllocator(limit=limit, expandable=self._expandable)
        blocks: dict[int, Block] = {}
        late = {place for place, one in enumerate(self._held) if one.category in ("optimizer", "gradient")}
        there = {place: None for place, one in enumerate(self._held) if one.allocated_event == BEFORE}
        try:
            self._allocate(allocator, blocks, [place for place in there if place not in late])
            for _ in self._step(allocator, blocks):
                self._allocate(allocator, blocks, [place for place in there if place in late])
            for place in [place for place in blocks if place not in there]:
                allocator.free(blocks.pop(place))
            self._allocate(allocator, blocks, [place for place in there if place not in blocks])
            for _ in self._step(allocator, blocks):
                pass
        except OutOfMemory:
            return None
        return allocator.peak_reserved

    def least_limit(self, low: int, high: int) -> float:
        """About the least that can be reserved at most, with what is cached given back when it runs out."""
        for _ in range(3):
            middle = (low + high) // 2
            low, high = (low, middle) if self.play(middle) is not None else (middle, high)
        return float(high)

    def _allocate(self, allocator: CachingAllocator, blocks: dict[int, Block], places: list[int]) -> None:
        for place in places:
            blocks[place] = allocator.allocate(self._held[place].bytes, self._held[place].lane)

    def _step(self, allocator: CachingAllocator, blocks: dict[int, Block]) -> Iterator[None]:
        """One step; yields once, before the first allocation of the optimizer's update."""
        held, updates = self._held, self._updates
        updated = False
        for place in self._events:
            if place >= 0:
                one = held[place]
                if not updated and one.allocated_at >= updates:
                    updated = True
                    yield
                blocks[place] = allocator.allocate(one.bytes, one.lane)
            elif -place - 1 in blocks:
                allocator.free(blocks.pop(-place - 1))
        if not updated:
            yield
