"""Why the device was idle: each idle instant of a window is given to one cause, so that the causes add up."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.explain.host import HostCause, blocking_calls, host_intervals
from headway.timeline import DEVICE_KINDS, Intervals, Timeline

LONGEST_LAUNCH_NS = 20_000
"""A kernel starts at most so long after its launch returned when nothing holds it back."""
DEVICE_WAIT, SYNCHRONISATION, HOST, UNKNOWN_CAUSE = "device_wait", "synchronisation", "host_launch", "unattributed"
CAUSES = (*(cause.value for cause in HostCause), SYNCHRONISATION, HOST, DEVICE_WAIT, UNKNOWN_CAUSE)
"""``host_launch``: the host was not fast enough. ``device_wait``: work was queued, but waited for an event or a peer,
or the device took its time between two kernels."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Idle:
    """Idle time of one rank's device by cause: disjoint sets of instants whose union is the idle time."""

    by_cause: dict[str, Intervals]

    def total_ns(self, window: tuple[int, int] | None = None) -> dict[str, int]:
        """Time by cause, of ``window`` alone if there is one; every cause of ``CAUSES`` is a key."""
        if window is None:
            return {cause: self.by_cause[cause].total_ns() for cause in CAUSES}
        return {cause: self.by_cause[cause].within(*window).total_ns() for cause in CAUSES}


def idle_by_cause(timeline: Timeline, launches: Integers, window: tuple[int, int]) -> Idle:
    """Split the idle time of one rank.

    A gap ends with a kernel. Until the host had launched that kernel the host is to blame: with what it did then
    (:class:`HostCause`), or with a synchronisation that had let the queue run empty when the gap began, or else with
    being slow. What remains once the kernel was queued is a wait of the device. ``launches``: int64, ``[spans]``, as
    :func:`headway.timeline.launches_of` gives them.
    """
    device = np.flatnonzero(timeline.kinds(*DEVICE_KINDS))
    gaps = timeline.intervals(device).gaps_in(*window)
    queued = _queued_ns(timeline, launches, device, gaps)
    known = queued > -1
    reached = np.clip(queued, gaps.starts, gaps.ends)
    at_once = (reached > gaps.starts) & (gaps.ends - reached <= LONGEST_LAUNCH_NS)
    reached = np.where(at_once, gaps.ends, reached)
    rest = Intervals.union_of(gaps.starts[known], reached[known])
    found: dict[str, Intervals] = {
        DEVICE_WAIT: Intervals.union_of(reached[known], gaps.ends[known]),
        UNKNOWN_CAUSE: Intervals.union_of(gaps.starts[~known], gaps.ends[~known]),
    }
    for cause in HostCause:
        during = host_intervals(timeline, cause)
        found[cause.value] = rest & during
        rest = rest - during
    waits = timeline.intervals(blocking_calls(timeline, launches))
    drained = known & waits.contains(gaps.starts)
    after_wait = Intervals.union_of(gaps.starts[drained], gaps.ends[drained])
    found[SYNCHRONISATION] = rest & after_wait
    found[HOST] = rest - after_wait
    return Idle(found)


def _queued_ns(timeline: Timeline, launches: Integers, device: Integers, gaps: Intervals) -> Integers:
    """When the host had queued the kernel that ends each gap; -1 where no launch of it is known, or it has no end."""
    queued = np.full(len(gaps), -1, dtype=np.int64)
    if not len(device) or not len(gaps):
        return queued
    device = device[np.argsort(timeline.start_ns[device], kind="stable")]
    starts = timeline.start_ns[device]
    first = np.minimum(np.searchsorted(starts, gaps.ends), len(device) - 1)
    ends = (starts[first] == gaps.ends) & (launches[device[first]] >= 0)
    calls = launches[device[first]]
    queued[ends] = timeline.end_ns[calls[ends]]
    return queued
