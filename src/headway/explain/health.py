"""Whether a trace can be believed, asked before anything is concluded from it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.explain.finding import HealthMessage, Severity
from headway.explain.host import LAUNCHES_KERNEL, named
from headway.explain.rank_trace import RankTrace
from headway.explain.rank_view import RankView
from headway.timeline import DEVICE_KINDS, UNKNOWN, Kind, Timeline, launches_of, run_facts
from headway.timeline.intervals import Mask

COVERED_SOME, COVERED_ENOUGH = 0.95, 0.995
"""Share of kernel launches whose kernel is in the trace: below the first nothing can be concluded."""
OVERLAP_NS = 1_000
"""Kernels of a stream may overlap by so much: the resolution of old traces."""
LATEST_NS, LONGEST_NS = 2**62, 10**16
"""No instant lies beyond (146 years), no span is longer (115 days)."""
FEW = 0.01
"""A share of events that does not change conclusions."""
LARGE_OVERHEAD = 0.01
SLOWED = 0.1
"""Profiled steps that are longer by more than this share are not the training's."""
LONGEST_QUEUE = 1024
"""Launches that a stream takes before its kernels run; the next one waits."""
LONE_EVENTS = 10
"""A pause that is this many times as long as all else comes of a wrong time, not of training."""

_WORLD = re.compile(r"\d+")


@dataclass(frozen=True)
class Repaired:
    """A trace without what can't be, and what was done to it."""

    trace: RankTrace
    messages: tuple[HealthMessage, ...]


def repaired(trace: RankTrace) -> Repaired:
    """Leave out spans with impossible times, and cut kernels that run far into later ones of their stream.

    Kernels without times (``ts`` and ``dur`` 0) are what a profiler writes that lost their record. On a stream kernels
    run one after the other; one may begin before its predecessor ends, but never several: then the predecessor's
    duration is wrong (as ROCm's profiler has it), and ends where the next one begins.
    """
    timeline = trace.timeline
    lost = timeline.kinds(*DEVICE_KINDS) & (timeline.start_ns == 0) & (timeline.duration_ns == 0)
    impossible = (np.abs(timeline.start_ns) > LATEST_NS) | (timeline.duration_ns > LONGEST_NS)
    messages = []
    device_count = max(int(timeline.kinds(*DEVICE_KINDS).sum()), 1)
    if count := int(lost.sum()):
        severity = Severity.FAILED if count > FEW * device_count else Severity.WARNING
        text = f"{count} device events have no times (ts and dur are 0) and were left out"
        messages.append(_message("zero-timestamps", severity, text, trace))
    if count := int(impossible.sum()):
        text = f"{count} events have impossible times and were left out"
        messages.append(_message("impossible-times", Severity.FAILED, text, trace))
    if (lost | impossible).any():
        timeline = timeline.select(~(lost | impossible))
    timeline, in_flight = _without_launches_in_flight(timeline)
    if in_flight:
        text = f"the kernels of the last {in_flight} launches come after the recording's end: those are left out"
        messages.append(_message("launches-in-flight", Severity.NOTE, text, trace))
    cut, count, longest = _cut_overruns(timeline)
    if count:
        text = (
            f"{count} kernels ran into several later ones of their own stream, the longest by {longest / 1000:,.0f} "
            "us, which can't be: each was cut where the next begins"
        )
        messages.append(_message("overrunning-kernels", Severity.WARNING, text, trace))
    return Repaired(replace(trace, timeline=cut), tuple(messages))


def _without_launches_in_flight(timeline: Timeline) -> tuple[Timeline, int]:
    """The Timeline without its last launches, whose kernels are not recorded any more, and how many those are.

    No more than a queue of launches holds: of more the kernels are missing.
    """
    launches = named(timeline, LAUNCHES_KERNEL, Kind.RUNTIME)
    launched = launches_of(timeline)[timeline.kinds(*DEVICE_KINDS)]
    seen = launched[launched >= 0]
    if not len(seen):
        return timeline, 0
    in_flight = launches & (timeline.start_ns > timeline.start_ns[seen].max())
    count = int(in_flight.sum())
    return (timeline.select(~in_flight), count) if 0 < count <= LONGEST_QUEUE else (timeline, 0)


def _cut_overruns(timeline: Timeline) -> tuple[Timeline, int, int]:
    """The Timeline with such kernels cut, how many they are, and the longest overrun in ns."""
    order, same, starts, ends = _by_stream(timeline)
    if len(order) < 3:
        return timeline, 0, 0
    second_next = same[:-1] & same[1:] & (ends[:-2] > starts[2:] + OVERLAP_NS)
    overruns = np.flatnonzero(second_next)
    if not len(overruns):
        return timeline, 0, 0
    duration = timeline.duration_ns.copy()
    cut_to = starts[overruns + 1] - starts[overruns]
    longest = int((ends[overruns] - starts[overruns + 1]).max())
    duration[order[overruns]] = cut_to
    return replace(timeline, duration_ns=duration), len(overruns), longest


def _by_stream(timeline: Timeline) -> tuple[NDArray[np.int64], Mask, NDArray[np.int64], NDArray[np.int64]]:
    """Device spans by stream and start, which of them share the stream with the next, their starts and ends."""
    device = np.flatnonzero(timeline.kinds(*DEVICE_KINDS))
    order = device[np.lexsort((timeline.start_ns[device], timeline.lane[device]))]
    lane = timeline.lane[order]
    return order, lane[1:] == lane[:-1], timeline.start_ns[order], timeline.end_ns[order]


def file_health(trace: RankTrace) -> Iterator[HealthMessage]:
    """What the file itself says, with or without device events."""
    if trace.truncated:
        text = "the file ends in the middle: events are missing, of the device's above all, which are written last"
        yield _message("truncated-file", Severity.FAILED, text, trace)
    if trace.mended:
        yield _message("mended-json", Severity.NOTE, "some of the text was no valid JSON; it was read as meant", trace)
    if trace.malformed:
        total = len(trace.timeline) + trace.malformed
        severity = Severity.FAILED if trace.malformed > FEW * total else Severity.WARNING
        text = f"{trace.malformed} of {total} events have no readable name, times or duration and were left out"
        yield _message("malformed-events", severity, text, trace)
    if not trace.rank_is_known:
        text = f"the file does not say of which rank it is; it is called rank {trace.rank} here"
        yield _message("rank-unknown", Severity.NOTE, text, trace)
    timeline = trace.timeline
    if trace.truncated or timeline.kinds(*DEVICE_KINDS).any():
        return
    launches = int(named(timeline, LAUNCHES_KERNEL, Kind.RUNTIME).sum())
    if launches:
        text = f"{launches} kernels were launched and none is in the trace: the profiler dropped them all"
        yield _message("missing-kernels", Severity.FAILED, text, trace)
    elif len(timeline):
        text = (
            "no kernel, copy or launch is in the trace: it was taken of the CPU alone (add ProfilerActivity.CUDA), "
            "so there is no device time to explain"
        )
        yield _message("cpu-only", Severity.FAILED, text, trace)
    else:
        yield _message("no-events", Severity.FAILED, "the trace holds no complete event", trace)


def device_health(view: RankView) -> Iterator[HealthMessage]:
    """What the events of the device and of its launches say."""
    yield from _coverage(view)
    yield from _overlaps(view)
    yield from _latencies(view)
    yield from _lone_events(view)
    yield from _steps(view)
    yield from _profiler(view)
    yield from _world(view)


def _coverage(view: RankView) -> Iterator[HealthMessage]:
    timeline = view.timeline
    launches = named(timeline, LAUNCHES_KERNEL, Kind.RUNTIME)
    launched = np.zeros(len(timeline), dtype=bool)
    launched[view.launches[view.launches >= 0]] = True
    count, covered = int(launches.sum()), int((launches & launched).sum())
    if count and covered < COVERED_ENOUGH * count:
        severity = Severity.FAILED if covered < COVERED_SOME * count else Severity.WARNING
        text = (
            f"{count - covered:,} of {count:,} launched kernels are not in the trace (coverage {covered / count:.1%}): "
            "idle time is overstated; start the profiler with a warm-up step"
        )
        yield _message("missing-kernels", severity, text, view.trace)
    orphans = int((view.launches[view.device] < 0).sum())
    if orphans > FEW * len(view.device):
        text = (
            f"{orphans:,} of {len(view.device):,} device events have no launch in the trace: idle time before them "
            "can't be given to a cause, and they belong to no step"
        )
        yield _message("kernels-without-launch", Severity.WARNING, text, view.trace)


def _overlaps(view: RankView) -> Iterator[HealthMessage]:
    _, same, starts, ends = _by_stream(view.timeline)
    over = ends[:-1] - starts[1:]
    overlapping = same & (over > OVERLAP_NS)
    if (count := int(overlapping.sum())) and not view.computes_on_host:
        text = (
            f"{count:,} kernels begin before the one before them on their stream ends, by up to "
            f"{over[overlapping].max() / 1000:,.1f} us (programmatic dependent launch, or wrong durations): unions are "
            "exact, sums of durations are not"
        )
        yield _message("stream-overlaps", Severity.WARNING, text, view.trace)


def _latencies(view: RankView) -> Iterator[HealthMessage]:
    timeline = view.timeline
    calls = view.launches[view.device]
    linked = view.device[calls >= 0]
    latency = timeline.start_ns[linked] - timeline.start_ns[calls[calls >= 0]]
    early = latency < 0
    if count := int(early.sum()):
        worst = -int(latency.min()) / 1000
        severe = count > 5 * FEW * len(linked)
        text = (
            f"{count:,} of {len(linked):,} kernels begin before their launch, by up to {worst:,.1f} us: the clocks of "
            "host and device disagree" + (", so the causes of idle time are not told apart" if severe else "")
        )
        severity = Severity.FAILED if severe else Severity.WARNING
        yield _message("negative-launch-latency", severity, text, view.trace)


def _lone_events(view: RankView) -> Iterator[HealthMessage]:
    gaps = view.timeline.intervals(view.device).gaps_in(*view.window)
    if not len(gaps):
        return
    longest = int(np.argmax(gaps.ends - gaps.starts))
    pause = int(gaps.ends[longest] - gaps.starts[longest])
    rest = view.window[1] - view.window[0] - pause
    before = int((view.timeline.start_ns[view.device] < gaps.starts[longest]).sum())
    few = min(before, len(view.device) - before)
    if pause > LONE_EVENTS * rest and few <= max(FEW * len(view.device), 1) and len(view.device) > 2:
        text = (
            f"{few} device events lie {pause / 1e6:,.0f} ms from all others, which take {rest / 1e6:,.1f} ms: "
            "their times are hardly right, and the window is not that of the training"
        )
        yield _message("lone-events", Severity.FAILED, text, view.trace)


def _steps(view: RankView) -> Iterator[HealthMessage]:
    if not view.steps:
        text = "the trace marks no training steps (ProfilerStep#N): times are of the whole window only"
        yield _message("no-steps", Severity.NOTE, text, view.trace)
        return
    step = view.timeline.step[view.device]
    numbers, counts = np.unique(step[step != UNKNOWN], return_counts=True)
    short = numbers[2 * counts < np.median(counts)].tolist()
    if short and len(view.steps) > 2:
        text = (
            f"steps {', '.join(map(str, short[:5]))} have less than half the device events of the others: the trace "
            "begins or ends within them"
        )
        yield _message("truncated-steps", Severity.WARNING, text, view.trace)


def _profiler(view: RankView) -> Iterator[HealthMessage]:
    timeline = view.timeline
    overhead = timeline.intervals(timeline.kinds(Kind.OVERHEAD)).total_ns()
    window = view.window[1] - view.window[0]
    if window and overhead > LARGE_OVERHEAD * window:
        text = (
            f"the profiler itself took {overhead / 1e6:,.1f} ms ({overhead / window:.1%} of the window): "
            "idle time during it is shown as the profiler's"
        )
        yield _message("profiler-overhead", Severity.WARNING, text, view.trace)
    yield from _profiled_steps(view)
    if functions := int(timeline.kinds(Kind.PYTHON).sum()):
        text = (
            f"Python functions were traced (with_stack, {functions:,} calls): the host was slower than without, so "
            "launch-bound time is an upper bound"
        )
        yield _message("python-stacks", Severity.NOTE, text, view.trace)


def _profiled_steps(view: RankView) -> Iterator[HealthMessage]:
    """What the run measured of its steps with the profiler and without."""
    told = run_facts(view.trace.facts)
    profiled, others = _times(told.get("step_ns")), _times(told.get("unprofiled_step_ns"))
    if len(profiled) and len(others) > 1:
        with_it, without = float(np.median(profiled)), float(np.median(others))
        adds = with_it / without - 1
        text = (
            f"profiled steps took {with_it / 1e6:,.1f} ms, {len(others)} before them without the profiler "
            f"{without / 1e6:,.1f} ms ({adds:+.1%})"
        )
        text += ": the host's share of the time is overstated" if adds > SLOWED else ""
        yield _message("profiled-steps", Severity.WARNING if adds > SLOWED else Severity.NOTE, text, view.trace)


def _times(values: object) -> list[float]:
    """Positive numbers of what a file holds."""
    return (
        [float(value) for value in values if type(value) in (int, float) and 0 < value < LATEST_NS]
        if isinstance(values, list)
        else []
    )


def _world(view: RankView) -> Iterator[HealthMessage]:
    world = world_size(view.trace)
    if world > 1 and not view.timeline.kinds(Kind.COMMUNICATION).any():
        text = (
            f"the run has {world} ranks and no kernel of this trace was recognised as communication: "
            "compute may hold communication of an unknown name"
        )
        yield _message("no-communication", Severity.WARNING, text, view.trace)


def world_size(trace: RankTrace) -> int:
    """How many ranks the run has as the file says; 0 when it does not."""
    distributed = trace.facts.get("distributedInfo")
    size = distributed.get("world_size") if isinstance(distributed, dict) else None
    if isinstance(size, str) and _WORLD.fullmatch(size) and len(size) < 9:
        size = int(size)
    return size if isinstance(size, int) and 0 < size < 2**31 else 0


def _message(name: str, severity: Severity, text: str, trace: RankTrace) -> HealthMessage:
    return HealthMessage(name, severity, text, trace.file, (trace.rank,))
