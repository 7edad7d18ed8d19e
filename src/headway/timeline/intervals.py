"""Exact interval algebra on integer nanoseconds: sets of disjoint half-open intervals, and the operations on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Nanoseconds = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Intervals:
    """A set of instants as half-open intervals ``[start, end)`` in ns: sorted, disjoint, not touching, none empty.

    Make one with :meth:`union_of`; the constructor takes what is in that form already. ``|``, ``&`` and ``-`` are
    union, intersection and difference. All lengths are sums of int64: exact below 2**63 ns (292 years).
    """

    starts: Nanoseconds
    ends: Nanoseconds

    @staticmethod
    def union_of(starts: ArrayLike, ends: ArrayLike) -> "Intervals":
        """The union of any intervals, in any order, overlapping or not; empty and backward ones (end <= start) vanish.

        Shapes ``[n]`` and ``[n]``, int64.
        """
        begin, end = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        kept = end > begin
        if not kept.all():
            begin, end = begin[kept], end[kept]
        if np.any(begin[1:] < begin[:-1]):
            order = np.argsort(begin, kind="stable")
            begin, end = begin[order], end[order]
        reach = np.maximum.accumulate(end)
        opens = np.ones(len(begin), dtype=bool)
        opens[1:] = begin[1:] > reach[:-1]
        first = np.flatnonzero(opens)
        last = np.append(first[1:] - 1, len(begin) - 1)[: len(first)]
        return Intervals(begin[first], reach[last])

    def __or__(self, other: "Intervals") -> "Intervals":
        return Intervals.union_of(np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends]))

    def __and__(self, other: "Intervals") -> "Intervals":
        return _combine(self, other, np.logical_and)

    def __sub__(self, other: "Intervals") -> "Intervals":
        return _combine(self, other, np.greater)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Intervals)
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.ends, other.ends)
        )

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.starts)

    def total_ns(self) -> int:
        """How much time the set covers."""
        return int((self.ends - self.starts).sum())

    def contains(self, instants: ArrayLike) -> Mask:
        """Which of ``instants`` (int64, shape ``[n]``) lie in the set: bool, shape ``[n]``."""
        at = np.asarray(instants, dtype=np.int64)
        return np.searchsorted(self.starts, at, side="right") > np.searchsorted(self.ends, at, side="right")

    def covered_ns(self, starts: ArrayLike, ends: ArrayLike) -> Nanoseconds:
        """How much of each interval ``[start, end)`` the set covers: int64, shape ``[n]``. They may overlap."""
        begin, end = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        covered: Nanoseconds = self._covered_before(np.maximum(begin, end)) - self._covered_before(begin)
        return covered

    def within(self, start: int, end: int) -> "Intervals":
        """The part of the set that lies in ``[start, end)``."""
        first = np.searchsorted(self.ends, start, side="right")
        last = np.searchsorted(self.starts, end, side="left") if end > start else first
        starts, ends = self.starts[first:last].copy(), self.ends[first:last].copy()
        np.maximum(starts[:1], start, out=starts[:1])
        np.minimum(ends[-1:], end, out=ends[-1:])
        return Intervals(starts, ends)

    def gaps_in(self, start: int, end: int) -> "Intervals":
        """What of ``[start, end)`` the set leaves uncovered."""
        return Intervals.union_of([start], [end]) - self

    def _covered_before(self, instants: Nanoseconds) -> Nanoseconds:
        """Time of the set that lies before each instant."""
        if not len(self):
            return np.zeros(instants.shape, dtype=np.int64)
        whole = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        begun = np.searchsorted(self.starts, instants, side="left")
        current = np.maximum(begun - 1, 0)
        beyond = np.maximum(self.ends[current] - instants, 0)
        before: Nanoseconds = np.where(begun > 0, whole[begun] - beyond, 0)
        return before


def _combine(a: Intervals, b: Intervals, keep: Callable[[Mask, Mask], Any]) -> Intervals:
    """The set of instants for which ``keep(in a, in b)`` holds. ``keep(False, False)`` must be False."""
    # Sorting runs that are sorted already takes one pass; np.unique would hash them all.
    edges = np.sort(np.concatenate([a.starts, a.ends, b.starts, b.ends]), kind="stable")
    edges = edges[np.diff(edges, prepend=edges[:1] - 1) > 0]
    kept = keep(a.contains(edges), b.contains(edges))
    changes = np.flatnonzero(np.diff(kept, prepend=False))
    return Intervals(edges[changes[0::2]], edges[changes[1::2]])
