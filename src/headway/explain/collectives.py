"""Collectives of all ranks laid side by side: who arrived last, who waited, and what the transfer itself took.

All ranks of a collective end together (its last message has to reach each of them), so the ends tell how far the
clocks of the ranks are apart; the starts, on one clock, tell who came last. Waiting is what a rank spent in a
collective before the last one had come; the rest is transfer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.timeline import UNKNOWN, Kind, Timeline

TOLERANCE_NS = 1_000_000
"""Ends of one collective lie within this after the clocks were brought together; otherwise it is not one collective."""
LOOSE_NS = 100_000_000
"""As much for gloo, whose threads a host runs when it has a core for them."""
BARRIERS = ("send", "recv")
"""These end with their own peer, not with all ranks of their group."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankCollectives:
    """The collectives of one rank in order of start; columns of one length."""

    rank: int
    key: tuple[tuple[str, str, int], ...]
    """(group or stream, collective, number among those of its group): the same on every rank that takes part."""
    start_ns: Integers
    end_ns: Integers
    bytes: Integers
    step: Integers
    names: tuple[str, ...]
    """Of the kernels."""
    span: Integers
    """Place of the kernel in the rank's Timeline."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """Collectives that all given ranks took part in, on the clock of the first rank."""

    ranks: tuple[int, ...]
    key: tuple[tuple[str, str, int], ...]
    start_ns: Integers
    """``[collectives, ranks]``"""
    end_ns: Integers
    bytes: Integers
    """``[collectives]``; of one rank, -1: not known."""
    span: Integers
    """``[collectives, ranks]``: place in each rank's Timeline."""
    offset_ns: Integers
    """``[ranks]``: what was subtracted from each rank's clock."""
    residual_ns: Integers
    """``[collectives]``: by how much the ends still differ."""
    left_out: int
    """Collectives of some rank that have no partner on all others, or whose ends disagree."""

    def __len__(self) -> int:
        return len(self.key)

    @property
    def last_arrival_ns(self) -> Integers:
        """When the last rank came: ``[collectives]``."""
        return self.start_ns.max(axis=1)

    @property
    def wait_ns(self) -> Integers:
        """Waiting of each rank: ``[collectives, ranks]``."""
        return self.last_arrival_ns[:, None] - self.start_ns

    @property
    def last_rank(self) -> Integers:
        """Which rank came last: ``[collectives]``, rank numbers."""
        return np.array(self.ranks)[self.start_ns.argmax(axis=1)]

    @property
    def transfer_ns(self) -> Integers:
        """From the last arrival to the last end: ``[collectives]``."""
        return np.maximum(self.end_ns.max(axis=1) - self.last_arrival_ns, 0)

    def second_last_ns(self) -> Integers:
        """When the last rank but one came: ``[collectives]``."""
        return np.sort(self.start_ns, axis=1)[:, -2]

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        waited = self.wait_ns.sum(axis=0)
        return {
            "ranks": list(self.ranks),
            "aligned": len(self),
            "left_out": self.left_out,
            "clock_offset_us": {str(r): ns / 1000 for r, ns in zip(self.ranks, self.offset_ns.tolist(), strict=True)},
            "residual_us": {
                "median": float(np.median(self.residual_ns)) / 1000,
                "largest": int(self.residual_ns.max()) / 1000,
            },
            "wait_us": {str(r): ns / 1000 for r, ns in zip(self.ranks, waited.tolist(), strict=True)},
            "transfer_us": int(self.transfer_ns.sum()) / 1000,
            "instances": [
                {
                    "group": key[0],
                    "collective": key[1],
                    "number": key[2],
                    "bytes": None if size == UNKNOWN else size,
                    "last_rank": last,
                    "largest_wait_us": waits / 1000,
                    "transfer_us": transfer / 1000,
                    "gb_per_s": None if size == UNKNOWN or not transfer else size / transfer,
                }
                for key, size, last, waits, transfer in zip(
                    self.key,
                    self.bytes.tolist(),
                    self.last_rank.tolist(),
                    self.wait_ns.max(axis=1).tolist(),
                    self.transfer_ns.tolist(),
                    strict=True,
                )
            ],
        }


def collectives_of(timeline: Timeline, rank: int) -> RankCollectives:
    """The collectives of one rank. Numbered by the group's own count where the trace has it, else by their order."""
    spans = np.flatnonzero(timeline.kinds(Kind.COMMUNICATION))
    spans = spans[np.argsort(timeline.start_ns[spans], kind="stable")]
    lanes: dict[int, int] = {}
    for lane in timeline.lane[spans].tolist():
        lanes.setdefault(lane, len(lanes))
    counts: dict[tuple[str, str], int] = {}
    keys = []
    for span in spans.tolist():
        group = timeline.strings[timeline.group[span]]
        # Streams have other numbers on other ranks; their order of first use is the same.
        place = f"group {group}" if group else f"stream {lanes[int(timeline.lane[span])]}"
        collective = timeline.strings[timeline.collective[span]] or timeline.strings[timeline.name[span]]
        number = counts.get((place, collective), 0)
        counts[place, collective] = number + 1
        sequence = int(timeline.sequence[span])
        keys.append((place, collective, number if sequence == UNKNOWN else sequence))
    return RankCollectives(
        rank=rank,
        key=tuple(keys),
        start_ns=timeline.start_ns[spans],
        end_ns=timeline.end_ns[spans],
        bytes=timeline.bytes[spans],
        step=timeline.step[spans].astype(np.int64),
        names=tuple(timeline.strings[name] for name in timeline.name[spans].tolist()),
        span=spans,
    )


def _clock_offsets(end_ns: Integers) -> Integers:
    """How far each rank's clock is ahead of the first one's: the median of its ends against the first rank's.

    An offset that is no larger than the ends scatter anyway says nothing of the clocks, and is 0. ``end_ns``:
    ``[collectives, ranks]``.
    """
    apart = end_ns - end_ns[:, :1]
    offset = np.median(apart, axis=0)
    scatter = np.quantile(np.abs(apart - offset), 0.9, axis=0)
    return np.where(np.abs(offset) <= scatter, 0, offset).round().astype(np.int64)


def align(ranks: Sequence[RankCollectives]) -> tuple[Aligned, ...]:
    """Lay the collectives of ranks side by side, once for each set of ranks that share groups; the largest set first.

    Of a mesh the ranks of a row share a group, those of a column another; a collective is laid beside those of its own
    group alone. Empty when no two ranks have a collective in common.
    """
    members: dict[str, list[int]] = {}
    for number, one in enumerate(ranks):
        for place in dict.fromkeys(key[0] for key in one.key):
            members.setdefault(place, []).append(number)
    places_of: dict[tuple[int, ...], set[str]] = {}
    for place, numbers in members.items():
        places_of.setdefault(tuple(numbers), set()).add(place)
    found = [_align(ranks, numbers, places) for numbers, places in places_of.items() if len(numbers) > 1]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: (-len(one.ranks), -len(one))))


def clock_offsets_ns(aligned: Sequence[Aligned]) -> dict[int, int]:
    """How far each rank's clock is ahead of the first one's, as far as shared collectives lead from rank to rank."""
    offsets: dict[int, int] = {}
    left = list(aligned)
    while left:
        one = next((one for one in left if offsets.keys() & set(one.ranks)), left[0])
        left.remove(one)
        own = dict(zip(one.ranks, one.offset_ns.tolist(), strict=True))
        shared = next((rank for rank in one.ranks if rank in offsets), None)
        shift = 0 if shared is None else offsets[shared] - own[shared]
        for rank, ahead in own.items():
            offsets.setdefault(rank, ahead + shift)
    return offsets


def _align(everyone: Sequence[RankCollectives], numbers: Sequence[int], groups: set[str]) -> Aligned | None:
    ranks = sorted((everyone[number] for number in numbers), key=lambda one: one.rank)
    places: list[Mapping[tuple[str, str, int], int]] = [
        {key: at for at, key in enumerate(one.key) if key[0] in groups and key[1] not in BARRIERS} for one in ranks
    ]
    common = [key for key in places[0] if all(key in place for place in places)]
    if not common:
        return None
    at = np.array([[place[key] for place in places] for key in common])
    start = np.stack([one.start_ns[at[:, number]] for number, one in enumerate(ranks)], axis=1)
    end = np.stack([one.end_ns[at[:, number]] for number, one in enumerate(ranks)], axis=1)
    offset = _clock_offsets(end)
    start, end = start - offset, end - offset
    residual = end.max(axis=1) - end.min(axis=1)
    loose = np.array([name.startswith("gloo:") for name in ranks[0].names])[at[:, 0]]
    together = residual <= np.where(loose, LOOSE_NS, TOLERANCE_NS)
    if not together.any():
        return None
    everything = set().union(*(place.keys() for place in places))
    return Aligned(
        ranks=tuple(one.rank for one in ranks),
        key=tuple(key for key, kept in zip(common, together.tolist(), strict=True) if kept),
        start_ns=start[together],
        end_ns=end[together],
        bytes=ranks[0].bytes[at[together, 0]],
        span=np.stack([one.span[at[together, number]] for number, one in enumerate(ranks)], axis=1),
        offset_ns=offset,
        residual_ns=residual[together],
        left_out=len(everything) - int(together.sum()),
    )
