"""What every pathology needs: evidence from spans, the kernels under operators, and when a gain is worth a finding."""

import re

import numpy as np
from numpy.typing import NDArray

from headway.explain.finding import Evidence, Recoverable
from headway.explain.host import named
from headway.explain.rank_view import RankView
from headway.explain.replay import Change
from headway.timeline import Intervals, Kind
from headway.timeline.intervals import Mask

WORTH = 0.01
"""Less of the window than this is no finding: steps of one run differ by about as much."""
NAMES_SHOWN = 4
LONGEST_NAME = 120

Integers = NDArray[np.int64]


def is_worth(gain: Recoverable, window_us: float) -> bool:
    """Whether the upper bound reaches ``WORTH`` of the window."""
    return gain.high_us >= WORTH * window_us > 0


def evidence_of(view: RankView, spans: Mask, text: str) -> Evidence:
    """Evidence of the spans of a mask: their most frequent names, their number and their time range."""
    names, counts = np.unique(view.timeline.name[spans], return_counts=True)
    most = names[np.argsort(-counts, kind="stable")][:NAMES_SHOWN].tolist()
    begin, end = view.us_range(spans)
    return Evidence(
        file=view.trace.file,
        events=tuple(view.timeline.strings[name][:LONGEST_NAME] for name in most),
        count=int(spans.sum()),
        text=text,
        ranks=(view.trace.rank,),
        start_us=begin,
        end_us=end,
    )


def operators(view: RankView, pattern: re.Pattern[str]) -> Mask:
    """Operators and annotations of the host whose name is of ``pattern``."""
    return named(view.timeline, pattern, Kind.OPERATOR, Kind.ANNOTATION)


def calls_during(view: RankView, intervals: Intervals) -> Mask:
    """Calls of the runtime that begin during ``intervals``."""
    calls: Mask = view.timeline.kinds(Kind.RUNTIME)
    calls[calls] = intervals.contains(view.timeline.start_ns[calls])
    return calls


def kernels_launched_during(view: RankView, intervals: Intervals) -> Mask:
    """Spans of the device whose launch begins during ``intervals``."""
    found = np.zeros(len(view.timeline), dtype=bool)
    launches = view.launches[view.device]
    launched = view.device[launches >= 0]
    found[launched] = intervals.contains(view.timeline.start_ns[launches[launches >= 0]])
    return found


def spans_of(view: RankView, mask: Mask) -> Intervals:
    """The time that the spans of a mask cover."""
    return view.timeline.intervals(mask)


def less_device_time(view: RankView, spans: Mask, factor: float) -> Change:
    """``factor`` of the time of the device spans of a mask is taken away."""
    graph = view.graph
    chosen = graph.of_spans(spans)
    return Change(device_ns=np.where(chosen, (graph.duration * factor).astype(np.int64), 0))


def less_host_time(view: RankView, intervals: Intervals, factor: float = 1.0) -> Change:
    """``factor`` of what the host did during ``intervals`` is taken away: its work between calls, and its calls."""
    graph = view.graph
    work = graph.host_within(view.timeline, intervals)
    calls = graph.calls_within(view.timeline, intervals)
    return Change(host_ns=(work * factor).astype(np.int64), call_ns=(calls * factor).astype(np.int64))


def without_waiting(view: RankView, calls: Mask) -> Change:
    """The calls of a mask wait for the device no longer and take no time."""
    graph = view.graph
    chosen = graph.of_spans(calls)
    return Change(unblocked=chosen, call_ns=np.where(chosen, graph.duration, 0))


def both(first: Change, second: Change) -> Change:
    """Two changes at once; where both take time from one thing, the larger."""

    def larger(a: Integers | None, b: Integers | None) -> Integers | None:
        return b if a is None else a if b is None else np.maximum(a, b)

    return Change(
        host_ns=larger(first.host_ns, second.host_ns),
        call_ns=larger(first.call_ns, second.call_ns),
        device_ns=larger(first.device_ns, second.device_ns),
        unblocked=first.unblocked
        if second.unblocked is None
        else second.unblocked
        if first.unblocked is None
        else first.unblocked | second.unblocked,
    )


def between(view: RankView, least: Change, most: Change) -> Recoverable:
    """The gain with bounds from two changes: the lower bound of the smaller one and the upper of the larger."""
    low, high = view.graph.gain(least), view.graph.gain(most)
    return Recoverable.of_window(low.low_us, max(low.high_us, high.high_us), view.window_us)


def per_step(view: RankView, microseconds: float) -> str:
    """``12.3 ms a step``; without steps ``12.3 ms``."""
    each = microseconds / view.step_count / 1000
    return f"{each:,.3g} ms a step" if view.steps else f"{each:,.3g} ms"


def percent(share: float) -> str:
    """``12.3 %``."""
    return f"{100 * share:.1f} %"
