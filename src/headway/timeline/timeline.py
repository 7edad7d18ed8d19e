"""The Timeline: spans of a predicted or measured run as columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.timeline.intervals import Intervals, Mask
from headway.timeline.kinds import Kind

UNKNOWN = -1
"""Stands in an integer column for what is not known."""

STRING_COLUMNS = ("lane", "name", "module", "phase", "axis", "collective", "group", "dtype")
INTEGER_COLUMNS: Mapping[str, Any] = {
    "rank": np.int32,
    "step": np.int32,
    "bytes": np.int64,
    "flops": np.int64,
    "correlation": np.int64,
    "operator": np.int64,
    "sequence": np.int64,
}
Strings = NDArray[np.int32]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans as columns, each of shape ``[spans]``. Instants and durations are integer nanoseconds.

    A string column holds places in ``strings``, whose first entry is ``""``: not known, or none. An integer column
    holds -1 for what is not known. A column that is the same everywhere takes no memory. Make one with :meth:`of`.
    """

    strings: tuple[str, ...]
    kind: NDArray[np.int8]
    """:class:`Kind`."""
    start_ns: Integers
    duration_ns: Integers
    """Never negative."""
    lane: Strings
    """What runs one span after the other: a stream, a thread, a communicator."""
    name: Strings
    module: Strings
    """Module path, as ``named_modules`` spells it."""
    phase: Strings
    """``forward``, ``backward``, ``recompute``, ``optimizer``, …"""
    axis: Strings
    """Mesh axis of a collective: ``dp_shard``, ``tp``, …"""
    collective: Strings
    """Which collective: ``all_reduce``, ``all_gather``, …, as its source spells it."""
    group: Strings
    """Name of the collective's process group."""
    dtype: Strings
    """Of what is computed with or sent, as torch calls it: ``bfloat16``, ``float8_e4m3fn``, …"""
    rank: NDArray[np.int32]
    step: NDArray[np.int32]
    bytes: Integers
    """Moved by a copy, contributed by this rank to a collective, or read and written once by a product."""
    flops: Integers
    correlation: Integers
    """The same for a launch and the kernel it launched."""
    operator: Integers
    """The same for an operator and the kernels it launched."""
    sequence: Integers
    """Which collective of its group, counted by the group."""

    @staticmethod
    def of(**columns: Any) -> "Timeline":
        """A Timeline from columns: string columns as sequences of str, the others as integers (or one for all spans).

        ``kind``, ``start_ns`` and ``duration_ns`` are required; what else is left out is not known. Raises ValueError
        for an unknown column, columns of different length or a negative duration.
        """
        unknown = set(columns) - {"kind", "start_ns", "duration_ns", *STRING_COLUMNS, *INTEGER_COLUMNS}
        if unknown:
            raise ValueError(f"not a column of a Timeline: {', '.join(sorted(unknown))}")
        length = len(columns["start_ns"])
        strings: dict[str, int] = {"": 0}
        return Timeline.of_columns(
            {
                name: _interned(values, strings) if name in STRING_COLUMNS else values
                for name, values in columns.items()
            },
            strings=strings,
            length=length,
        )

    @staticmethod
    def of_columns(columns: Mapping[str, ArrayLike], strings: Iterable[str], length: int) -> "Timeline":
        """A Timeline of ``length`` spans whose string columns hold places in ``strings`` already (``""`` first)."""
        dtypes = {"kind": np.int8, "start_ns": np.int64, "duration_ns": np.int64, **INTEGER_COLUMNS}
        arrays: dict[str, Any] = {name: np.broadcast_to(np.int32(0), length) for name in STRING_COLUMNS}
        arrays |= {name: np.broadcast_to(dtype(UNKNOWN), length) for name, dtype in INTEGER_COLUMNS.items()}
        for name, values in columns.items():
            array = np.asarray(values, dtype=dtypes.get(name, np.int32))
            arrays[name] = np.broadcast_to(array, length) if array.ndim == 0 else array
        if wrong := [name for name, array in arrays.items() if array.shape != (length,)]:
            raise ValueError(f"columns {', '.join(wrong)} have another length than start_ns ({length})")
        if length and arrays["duration_ns"].min() < 0:
            raise ValueError("a span has a negative duration")
        return Timeline(strings=tuple(strings), **arrays)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Integers:
        """Where each span ends."""
        return self.start_ns + self.duration_ns

    def text(self, column: str) -> list[str]:
        """A string column as str, one per span."""
        return [self.strings[place] for place in getattr(self, column).tolist()]

    def select(self, spans: ArrayLike) -> "Timeline":
        """The spans of a mask (bool, ``[spans]``) or of places (integers), in that order."""
        chosen = np.asarray(spans)
        return Timeline(strings=self.strings, **{name: _take(getattr(self, name), chosen) for name in _ARRAYS})

    def of_rank(self, rank: int) -> "Timeline":
        """The spans of one rank."""
        return self.select(self.rank == rank)

    def ranks(self) -> list[int]:
        """The ranks there are, ascending."""
        return [int(rank) for rank in np.unique(self.rank)]

    def kinds(self, *kinds: Kind) -> Mask:
        """Which spans are of one of ``kinds``: bool, ``[spans]``."""
        wanted = np.zeros(len(Kind), dtype=bool)
        wanted[list(kinds)] = True
        mask: Mask = wanted[self.kind]
        return mask

    def matching(self, column: str, wanted: Iterable[str]) -> Mask:
        """Which spans hold one of the strings ``wanted`` in a string column: bool, ``[spans]``."""
        known = set(wanted)
        mask: Mask = np.array([string in known for string in self.strings], dtype=bool)[getattr(self, column)]
        return mask

    def intervals(self, spans: NDArray[Any]) -> Intervals:
        """The time that the spans of a mask or of places cover together."""
        starts = self.start_ns[spans]
        return Intervals.union_of(starts, starts + self.duration_ns[spans])

    def window(self, spans: NDArray[Any]) -> tuple[int, int]:
        """First start and last end (ns) of the spans of a mask or of places. Raises ValueError when there are none."""
        starts = self.start_ns[spans]
        if not len(starts):
            raise ValueError("no spans: there is no window")
        return int(starts.min()), int((starts + self.duration_ns[spans]).max())


_ARRAYS = ("kind", "start_ns", "duration_ns", *STRING_COLUMNS, *INTEGER_COLUMNS)


def concatenate(timelines: Sequence[Timeline]) -> Timeline:
    """The spans of all ``timelines``, one after the other, in one Timeline: ranks of a run, steps of a prediction."""
    strings: dict[str, int] = {"": 0}
    places = [
        np.array([strings.setdefault(string, len(strings)) for string in timeline.strings], dtype=np.int32)
        for timeline in timelines
    ]
    columns: dict[str, ArrayLike] = {}
    for name in _ARRAYS:
        parts = [getattr(timeline, name) for timeline in timelines]
        if name in STRING_COLUMNS:
            parts = [place[part] for place, part in zip(places, parts, strict=True)]
        columns[name] = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return Timeline.of_columns(columns, strings, length=sum(map(len, timelines)))


def _interned(values: Any, strings: dict[str, int]) -> Any:
    """Places in ``strings``, which grows. One str stands for all spans."""
    if isinstance(values, str):
        return strings.setdefault(values, len(strings))
    return np.array([strings.setdefault(value, len(strings)) for value in values], dtype=np.int32)


def _take(column: NDArray[Any], chosen: NDArray[Any]) -> NDArray[Any]:
    """``column[chosen]``; a column that is the same everywhere stays without memory."""
    if column.strides == (0,) and len(column):
        return np.broadcast_to(column[0], int(chosen.sum()) if chosen.dtype == bool else len(chosen))
    taken: NDArray[Any] = column[chosen]
    return taken
