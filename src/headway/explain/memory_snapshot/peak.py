"""The history played: when most was in use, what held it, and how it lay in the segments."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.explain.memory_snapshot.snapshot import Action, DeviceSnapshot, Segment, Stack

TAKES = ("segment_alloc", "segment_map")
GIVES_BACK = ("segment_free", "segment_unmap")


@dataclass(frozen=True, eq=False)
class Held:
    """Memory in use at the peak."""

    address: int
    size: int
    stack: Stack
    recorded: bool
    """The history tells where it was allocated; if not, it was there before."""


@dataclass(frozen=True, eq=False)
class Peak:
    """The moment when most memory was in use. All sizes are bytes."""

    place: int
    """Actions of the history until then; its whole length when no history tells more than the snapshot itself."""
    time_us: int | None
    allocated: int
    reserved: int
    held: tuple[Held, ...]
    in_split_segments: int
    """Unused between blocks in use: only a request that fits one of the holes can have it."""
    in_empty_segments: int
    """In segments without a block in use: cached, and given back before the allocator runs out."""
    largest_hole: int
    freed_unseen: int
    """Bytes that the history frees without having allocated them: it began, or was overwritten, in the middle."""
    curve: NDArray[np.int64] = field(repr=False)
    """Bytes in use after each action, int64 ``[actions]``."""


def peak_of(snapshot: DeviceSnapshot) -> Peak:
    """Play the history backwards from the state of the snapshot, which is exact, to the peak."""
    changes = np.array([_change(action) for action in snapshot.history], dtype=np.int64)
    after = snapshot.active - (changes.sum() - np.cumsum(changes)) if len(changes) else np.zeros(0, dtype=np.int64)
    place = int(np.argmax(after)) + 1 if len(after) and after.max() > snapshot.active else len(changes)
    held, freed_unseen = _held(snapshot, place)
    segments = _segments_at(snapshot, place)
    split, empty, largest = _holes(segments, held)
    return Peak(
        place=place,
        time_us=snapshot.history[place - 1].time_us if place else None,
        allocated=sum(block.size for block in held),
        reserved=snapshot.reserved - sum(_reserved_change(action) for action in snapshot.history[place:]),
        held=held,
        in_split_segments=split,
        in_empty_segments=empty,
        largest_hole=largest,
        freed_unseen=freed_unseen,
        curve=after,
    )


def _change(action: Action) -> int:
    if action.what == "alloc":
        return action.size
    return -action.size if action.what == "free_completed" else 0


def _reserved_change(action: Action) -> int:
    if action.what in TAKES:
        return action.size
    return -action.size if action.what in GIVES_BACK else 0


def _held(snapshot: DeviceSnapshot, place: int) -> tuple[tuple[Held, ...], int]:
    """What is in use after ``place`` actions, and the bytes that the history frees without having allocated them."""
    live: dict[int, Held] = {}
    unseen: dict[int, Held] = {}
    later: set[int] = set()
    for number, action in enumerate(snapshot.history):
        if action.what == "alloc":
            if number < place:
                live[action.address] = Held(action.address, action.size, action.stack, recorded=True)
            later.add(action.address)
        elif action.what == "free_completed":
            if action.address not in later:
                # Freed without having been allocated in the history: it was there from the beginning.
                unseen[action.address] = Held(action.address, action.size, (), recorded=False)
                later.add(action.address)
                if number >= place:
                    live[action.address] = unseen[action.address]
            elif number < place:
                live.pop(action.address, None)
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.active and block.address not in later:
                live[block.address] = Held(block.address, block.size, block.stack, recorded=False)
    return tuple(live.values()), sum(block.size for block in unseen.values())


def _segments_at(snapshot: DeviceSnapshot, place: int) -> list[Segment]:
    """The segments as they were after ``place`` actions, without their blocks."""
    extents = {segment.address: segment.size for segment in snapshot.segments}
    for action in reversed(snapshot.history[place:]):
        if action.what in TAKES:
            extents.pop(action.address, None)
        elif action.what in GIVES_BACK:
            extents[action.address] = action.size
    return [Segment(address, size, ()) for address, size in sorted(extents.items())]


def _holes(segments: Sequence[Segment], held: Sequence[Held]) -> tuple[int, int, int]:
    """Unused bytes in segments with a block in use, in those without, and the largest hole of all."""
    starts = [segment.address for segment in segments]
    inside: dict[int, list[Held]] = defaultdict(list)
    for block in held:
        number = int(np.searchsorted(starts, block.address, side="right")) - 1
        if number >= 0 and block.address < segments[number].address + segments[number].size:
            inside[number].append(block)
    split = empty = largest = 0
    for number, segment in enumerate(segments):
        blocks = sorted(inside.get(number, []), key=lambda block: block.address)
        if not blocks:
            empty += segment.size
            largest = max(largest, segment.size)
            continue
        place, end = segment.address, segment.address + segment.size
        for block in blocks:
            split += max(0, block.address - place)
            largest = max(largest, block.address - place)
            place = max(place, block.address + block.size)
        split += max(0, end - place)
        largest = max(largest, end - place)
    return split, empty, largest
