"""Replaying a measured rank with something taken away: what the step would take then.

The graph holds the host's calls in their order, with the work between them, and the device's spans, each after its
launch, its predecessor on its stream and what it was seen to wait for on other streams. A host call that waits for
the device ends after the span that it waited for. Played unchanged it gives every measured instant back. Since a trace
does not tell all dependencies, each question is played twice: with those that are seen (the optimistic bound), and with
every span also behind whatever had ended before it began (the pessimistic one). Waits for other ranks inside
collectives keep their length.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.explain.finding import Recoverable
from headway.explain.host import blocking_calls
from headway.timeline import Intervals, Timeline

MOST_SPANS = 12_000
"""Device spans that are replayed: whole steps from the head of the trace; gains are told for the whole window."""
LAUNCH_NS, GAP_NS, HELD_NS = 5_000, 1_000, 5_000
"""A launch and a change of kernel take at most so long when they are not what was waited for; a span that begins later
than that after both was held by something else."""
_LAUNCH, _SPAN, _WAIT = 0, 1, 2
"""Sorts of nodes, in the order in which they stand at one instant."""

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Change:
    """What is taken away from a graph. Arrays of its length or None: nothing of that sort."""

    host_ns: Integers | None = None
    """Less host work before each call."""
    call_ns: Integers | None = None
    """Less time in each call."""
    device_ns: Integers | None = None
    """Less time of each device span."""
    unblocked: Mask | None = None
    """Calls that wait for the device no longer."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The dependency graph of one rank's host calls and device spans. Columns: one entry a node, in order of time.

    A call that waits for the device stands where it ends; when it launches something besides (a blocking copy), a node
    of no length stands for the launch where it begins.
    """

    places: Integers
    """The node's span in the Timeline."""
    on_device: Mask
    duration: Integers
    before: Integers
    """Host work since the previous call's end; of device spans 0."""
    launch: Integers
    """Node of a device span's launch, -1 for none."""
    launch_gap: Integers
    previous: Integers
    """Node before it on its stream, -1 for none. Of a call that waits: the span it waits for."""
    previous_gap: Integers
    seen: Integers
    """Node on another stream that it was seen to wait for, -1 for none."""
    seen_gap: Integers
    ended: Integers
    """The node that had ended last when it began, -1 for none."""
    ended_gap: Integers
    tail: Integers
    """From the end of what a call waits for to the call's end."""
    blocks: Mask
    share_of_window: float
    """Of the rank's window, what the graph covers."""
    window_us: float
    """The rank's whole window."""

    def __len__(self) -> int:
        return len(self.places)

    def length_ns(self, change: Change | None = None, pessimistic: bool = False) -> int:
        """From the first device span's start to the last end, with ``change``."""
        change = change or Change()
        zero = np.zeros(len(self), dtype=np.int64)
        less_before = zero if change.host_ns is None else change.host_ns
        less_call = zero if change.call_ns is None else change.call_ns
        less_device = zero if change.device_ns is None else change.device_ns
        before = (self.before - np.minimum(less_before, np.maximum(self.before, 0))).tolist()
        less = np.where(self.on_device, less_device, less_call)
        duration = (self.duration - np.minimum(less, self.duration)).tolist()
        blocks = (self.blocks if change.unblocked is None else self.blocks & ~change.unblocked).tolist()
        launch, launch_gap = self.launch.tolist(), self.launch_gap.tolist()
        previous, previous_gap = self.previous.tolist(), self.previous_gap.tolist()
        held, held_gap = (self.ended, self.ended_gap) if pessimistic else (self.seen, self.seen_gap)
        holds, holds_gap, tail = held.tolist(), held_gap.tolist(), self.tail.tolist()
        on_device = self.on_device.tolist()
        starts, ends = [0] * len(self), [0] * len(self)
        host, first, last = 0, None, 0
        for node in range(len(self)):
            if on_device[node]:
                start = starts[launch[node]] + launch_gap[node] if launch[node] >= 0 else None
                if previous[node] >= 0:
                    after = ends[previous[node]] + previous_gap[node]
                    start = after if start is None or after > start else start
                if holds[node] >= 0:
                    after = ends[holds[node]] + holds_gap[node]
                    start = after if start is None or after > start else start
                start = before[node] if start is None else start
                end = start + duration[node]
                first = start if first is None or start < first else first
                last = max(last, end)
            else:
                start = host + before[node]
                end = start + duration[node]
                if blocks[node] and previous[node] >= 0:
                    end = max(start, ends[previous[node]]) + tail[node]
                host = max(host, end)
            starts[node], ends[node] = start, end
        return last - (first or 0)

    @cached_property
    def _unchanged_ns(self) -> tuple[int, int]:
        return self.length_ns(), self.length_ns(pessimistic=True)

    def gain(self, change: Change) -> Recoverable:
        """What the whole window is shorter by without what ``change`` takes away: from both replays, low and high."""
        optimistic = self._unchanged_ns[0] - self.length_ns(change)
        careful = self._unchanged_ns[1] - self.length_ns(change, pessimistic=True)
        scale = 1 / self.share_of_window / 1000
        low, high = sorted((optimistic * scale, careful * scale))
        return Recoverable.of_window(low, high, self.window_us)

    def host_within(self, timeline: Timeline, intervals: Intervals) -> Integers:
        """How much of each call's host work before it falls into ``intervals``: int64, one entry a node."""
        starts = timeline.start_ns[self.places]
        return np.where(self.on_device, 0, intervals.covered_ns(starts - np.maximum(self.before, 0), starts))

    def calls_within(self, timeline: Timeline, intervals: Intervals) -> Integers:
        """How much of each call falls into ``intervals``: int64, one entry a node."""
        starts = timeline.start_ns[self.places]
        return np.where(self.on_device, 0, intervals.covered_ns(starts, starts + self.duration))

    def of_spans(self, spans: Mask) -> Mask:
        """Which nodes stand for one of ``spans`` (a mask over the Timeline)."""
        chosen: Mask = spans[self.places]
        return chosen


def graph_of(timeline: Timeline, launches: Integers, device: Integers, steps: tuple[tuple[int, int], ...]) -> Graph:
    """The graph of whole steps from the head of a rank's trace, up to ``MOST_SPANS`` device spans, at least one step.

    ``device``: places of device spans by start; ``steps``: their windows, none when no steps are told. Both as
    :class:`headway.explain.rank_view.RankView` has them.
    """
    window = timeline.window(device)
    chosen = _head(timeline, device, steps)
    begin, end = int(timeline.start_ns[chosen[0]]), int(timeline.end_ns[chosen].max())
    calls = np.unique(launches[chosen][launches[chosen] >= 0])
    blocking = np.flatnonzero(blocking_calls(timeline, launches))
    near = (timeline.end_ns[blocking] >= begin) & (timeline.start_ns[blocking] <= end)
    waiting = blocking[near]
    places = np.concatenate([calls, chosen, waiting])
    sort = np.repeat([_LAUNCH, _SPAN, _WAIT], [len(calls), len(chosen), len(waiting)])
    order = np.lexsort((sort, np.where(sort == _WAIT, timeline.end_ns[places], timeline.start_ns[places])))
    places, sort = places[order], sort[order]
    duration = np.where((sort == _LAUNCH) & np.isin(places, waiting), 0, timeline.duration_ns[places])
    return Graph(
        places=places,
        on_device=sort == _SPAN,
        duration=duration,
        share_of_window=max(end - begin, 1) / max(window[1] - window[0], 1),
        window_us=(window[1] - window[0]) / 1000,
        **_columns(timeline, launches, places, duration, sort),
    )


def _head(timeline: Timeline, device: Integers, steps: tuple[tuple[int, int], ...]) -> Integers:
    """Device spans of the first steps; of a trace without steps, all or the first ``MOST_SPANS``."""
    if len(device) <= MOST_SPANS:
        return device
    ends = [end for _, end in steps]
    starts = timeline.start_ns[device]
    counts = np.searchsorted(starts, ends)
    fitting = counts[counts <= MOST_SPANS]
    return device[: int(fitting[-1])] if len(fitting) and fitting[-1] else device[:MOST_SPANS]


def _columns(
    timeline: Timeline, launches: Integers, places: Integers, duration: Integers, sort: Integers
) -> dict[str, Any]:
    count = len(places)
    starts = timeline.start_ns[places]
    ends = starts + duration
    node_of = np.full(len(timeline) + 1, -1, dtype=np.int64)
    node_of[places[sort == _LAUNCH]] = np.flatnonzero(sort == _LAUNCH)
    found = {name: np.full(count, -1, dtype=np.int64) for name in ("launch", "previous", "seen", "ended")}
    gaps = {f"{name}_gap": np.zeros(count, dtype=np.int64) for name in found}
    before, tail = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    nodes, calls, waiting = (np.flatnonzero(which) for which in (sort == _SPAN, sort != _SPAN, sort == _WAIT))
    found["launch"][nodes] = node_of[launches[places[nodes]]]
    found["launch"][found["launch"] > np.arange(count)] = -1  # begun before its launch: clocks that disagree
    _on_streams(timeline, places, nodes, found["previous"])
    by_end = nodes[np.argsort(ends[nodes], kind="stable")]
    _ended_before(starts, ends, nodes, by_end, found["ended"])
    host_end = np.maximum.accumulate(ends[calls]) if len(calls) else ends[calls]
    before[calls] = starts[calls] - np.concatenate([[starts[0]], host_end[:-1]]) if len(calls) else 0
    _binding(starts, ends, nodes, found, gaps)
    rootless = nodes[(found["launch"][nodes] < 0) & (found["previous"][nodes] < 0) & (found["ended"][nodes] < 0)]
    before[rootless] = starts[rootless] - starts[0]
    found["ended"][rootless], found["seen"][rootless] = -1, -1
    _waited_for(starts, ends, waiting, by_end, found["previous"], tail)
    return {**found, **gaps, "before": before, "tail": tail, "blocks": sort == _WAIT}


def _on_streams(timeline: Timeline, places: Integers, nodes: Integers, previous: Integers) -> None:
    lane = timeline.lane[places[nodes]]
    order = nodes[np.argsort(lane, kind="stable")]
    lanes = timeline.lane[places[order]]
    same = lanes[1:] == lanes[:-1]
    previous[order[1:][same]] = order[:-1][same]


def _ended_before(starts: Integers, ends: Integers, nodes: Integers, by_end: Integers, ended: Integers) -> None:
    at = np.searchsorted(ends[by_end], starts[nodes], side="right") - 1
    known = at >= 0
    ended[nodes[known]] = by_end[at[known]]
    ended[ended >= np.arange(len(ended))] = -1


def _binding(
    starts: Integers, ends: Integers, nodes: Integers, found: dict[str, Integers], gaps: dict[str, Integers]
) -> None:
    """Gaps after each thing that a span waits for, so that the latest of them all is exactly the span's start."""
    far = np.int64(-(2**62))
    at = starts[nodes]
    ready = {}
    for name, time, slack in (("launch", starts, LAUNCH_NS), ("previous", ends, GAP_NS), ("ended", ends, GAP_NS)):
        other = found[name][nodes]
        when = np.where(other >= 0, time[other], far)
        gap = np.clip(at - when, None, slack)
        ready[name] = (when, gap)
        gaps[f"{name}_gap"][nodes] = np.where(other >= 0, gap, 0)
    reached = {name: when + gap for name, (when, gap) in ready.items()}
    own = np.maximum(reached["launch"], reached["previous"])
    held = (at - own > HELD_NS) & (reached["ended"] > own) & (found["ended"][nodes] != found["previous"][nodes])
    found["seen"][nodes[held]] = found["ended"][nodes[held]]
    for name, gap_name in (("seen", "seen_gap"), ("ended", "ended_gap")):
        when = np.where(found[name][nodes] >= 0, ends[found[name][nodes]], far)
        gaps[gap_name][nodes] = np.where(found[name][nodes] >= 0, np.clip(at - when, None, GAP_NS), 0)
    # What is left between the latest of them and the start belongs to that one.
    late = {"launch": reached["launch"], "previous": reached["previous"]}
    late["seen"] = np.where(found["seen"][nodes] >= 0, reached["ended"], far)
    names = list(late)
    last = np.argmax(np.stack([late[name] for name in names]), axis=0)
    for number, name in enumerate(names):
        mine = nodes[(last == number) & (found[name][nodes] >= 0)]
        time = starts if name == "launch" else ends
        gaps[f"{name}_gap"][mine] = starts[mine] - time[found[name][mine]]
    both = nodes[found["seen"][nodes] >= 0]
    gaps["ended_gap"][both] = gaps["seen_gap"][both]


def _waited_for(
    starts: Integers, ends: Integers, waiting: Integers, by_end: Integers, previous: Integers, tail: Integers
) -> None:
    """The device span that ended last before each waiting call did, and what came after it."""
    if not len(by_end):
        return
    at = np.searchsorted(ends[by_end], ends[waiting], side="right") - 1
    known = waiting[at >= 0]
    previous[known] = by_end[at[at >= 0]]
    tail[known] = ends[known] - np.maximum(ends[previous[known]], starts[known])
