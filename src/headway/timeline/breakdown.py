"""Where the time of a rank went: busy, idle, compute, communication and how much of it was hidden."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.timeline.intervals import Intervals
from headway.timeline.kinds import DEVICE_KINDS, Kind
from headway.timeline.timeline import Timeline


@dataclass(frozen=True)
class Breakdown:
    """Time of one rank's device in a window, in ns. Each is the length of a union over all lanes, so they may overlap.

    Definitions: busy is covered by any kernel, copy or fill; communication by collectives, whatever their name; compute
    by the other kernels; memory by copies and fills.
    """

    window: tuple[int, int]
    busy_ns: int
    compute_ns: int
    communication_ns: int
    memory_ns: int
    exposed_communication_ns: int
    """Communication while nothing computes."""
    alone_communication_ns: int
    """Communication while nothing computes and nothing is copied."""

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return self.window[1] - self.window[0]

    @property
    def idle_ns(self) -> int:
        """Time of the window in which the device does nothing."""
        return self.window_ns - self.busy_ns

    @property
    def overlap_ns(self) -> int:
        """Communication while something computes."""
        return self.communication_ns - self.exposed_communication_ns

    @property
    def overlap_percent(self) -> float | None:
        """Share of communication hidden behind compute; None without communication."""
        return 100 * self.overlap_ns / self.communication_ns if self.communication_ns else None

    def percent_of_window(self, nanoseconds: int) -> float:
        """``nanoseconds`` as a share of the window; 0 of an empty one."""
        return 100 * nanoseconds / self.window_ns if self.window_ns else 0.0


def breakdown(timeline: Timeline, window: tuple[int, int] | None = None) -> Breakdown:
    """The breakdown of a Timeline of one rank, in ``window`` (ns) or from its first device span to its last.

    Raises ValueError when the Timeline holds several ranks, or when it needs a window and has no device span.
    """
    _one_rank(timeline)
    inside = timeline.window(timeline.kinds(*DEVICE_KINDS)) if window is None else window
    compute, communication, memory = (timeline.intervals(timeline.kinds(kind)) for kind in DEVICE_KINDS)
    return breakdown_of(compute, communication, memory, inside)


def breakdown_of(compute: Intervals, communication: Intervals, memory: Intervals, window: tuple[int, int]) -> Breakdown:
    """The breakdown of one rank's ``window`` (ns) from when its device computes, communicates, and copies or fills."""
    compute, communication, memory = (part.within(*window) for part in (compute, communication, memory))
    exposed = communication - compute
    return Breakdown(
        window=window,
        busy_ns=(compute | communication | memory).total_ns(),
        compute_ns=compute.total_ns(),
        communication_ns=communication.total_ns(),
        memory_ns=memory.total_ns(),
        exposed_communication_ns=exposed.total_ns(),
        alone_communication_ns=(exposed - memory).total_ns(),
    )


def attributed_ns(timeline: Timeline, window: tuple[int, int] | None = None) -> NDArray[np.int64]:
    """The part of the window that each span stands for, so that the parts add up to the busy time: int64, ``[spans]``.

    Every busy instant belongs to one span: to one that computes if there is one, else to a copy or fill, else to
    communication; among several of a kind, to the one that began first. So a collective stands for its exposed time,
    and a span that is hidden, or is none of the device's, for nothing. One rank only; raises ValueError as
    :func:`breakdown`.
    """
    _one_rank(timeline)
    device = timeline.kinds(*DEVICE_KINDS)
    begin, end = timeline.window(device) if window is None else window
    attributed = np.zeros(len(timeline), dtype=np.int64)
    taken = Intervals.union_of([], [])
    for kind in (Kind.COMPUTE, Kind.MEMORY, Kind.COMMUNICATION):
        spans = np.flatnonzero(timeline.kinds(kind))
        spans = spans[np.argsort(timeline.start_ns[spans], kind="stable")]
        starts = np.clip(timeline.start_ns[spans], begin, end)
        ends = np.clip(timeline.end_ns[spans], begin, end)
        reached = np.concatenate([[begin], np.maximum.accumulate(ends)])[: len(spans)]
        starts = np.minimum(np.maximum(starts, reached), ends)
        attributed[spans] = ends - starts - taken.covered_ns(starts, ends)
        taken = taken | Intervals.union_of(starts, ends)
    return attributed


def _one_rank(timeline: Timeline) -> None:
    if len(ranks := timeline.ranks()) > 1:
        raise ValueError(f"a Timeline of one rank is wanted, this one holds {len(ranks)}: take of_rank(…) of it")
