"""A host that is too slow: launches, pauses, compilation, garbage collection, checkpoints."""

import re
from collections.abc import Iterator

import numpy as np

from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix, Recoverable
from headway.explain.host import NAMES, HostCause, host_intervals, named
from headway.explain.idle import HOST
from headway.explain.pathologies.evidence import (
    WORTH,
    between,
    evidence_of,
    is_worth,
    less_host_time,
    per_step,
    percent,
)
from headway.explain.rank_view import RankView
from headway.explain.replay import Change
from headway.timeline import Intervals, Kind

LAUNCH_BOUND = 0.05
"""Share of the window idle for the host's launches from which a step is called launch bound."""
SHORT_NS = 10_000
PAUSE_NS = 20_000_000
"""A host that calls nothing and notes nothing for so long was not computing what to launch."""
WARM_UP = 1.5
"""A first step of this many times the others' median is a warm-up."""
_LAZY = re.compile(r"Lazy Function Loading|(cuda|hip)?ModuleLoad|cudaLibraryLoad|autotun", re.I)

Causes = tuple[HostCause, str, str, str, CauseClass, Fix]
_STALLS: tuple[Causes, ...] = (
    (
        HostCause.GARBAGE_COLLECTION,
        "garbage-collection",
        "Python's garbage collector stops the host",
        "collects garbage",
        CauseClass.HOST,
        Fix("gc.disable() and gc.collect(1) every N steps on all ranks at once; gc.freeze() after the first step."),
    ),
    (
        HostCause.COMPILE,
        "recompilation",
        "The model is compiled again during training",
        "compiles",
        CauseClass.HOST,
        Fix(
            "Find what changes with TORCH_LOGS=recompiles; mark it dynamic (mark_dynamic) or pad to a few sizes. "
            "Compile before the first measured step."
        ),
    ),
    (
        HostCause.CHECKPOINT,
        "checkpoint-stall",
        "The step waits for a checkpoint",
        "writes a checkpoint",
        CauseClass.CHECKPOINT,
        Fix(
            "Copy the state to pinned memory and write it from another process or thread, less often.",
            {"checkpoint.asynchronous": True},
        ),
    ),
)


def find_launch(view: RankView) -> Iterator[Finding]:
    """Findings about the host of one rank."""
    for stall in _STALLS:
        yield from _stall(view, *stall)
    yield from _pauses(view)
    yield from _launch_bound(view)
    yield from _warm_up(view)


def _stall(
    view: RankView, cause: HostCause, name: str, title: str, what: str, cause_class: CauseClass, fix: Fix
) -> Iterator[Finding]:
    idle_ns = view.idle.by_cause[cause.value].total_ns()
    if idle_ns / 1000 < WORTH * view.window_us:
        return
    during = host_intervals(view.timeline, cause)
    gain = view.graph.gain(less_host_time(view, during))
    gain = Recoverable.of_window(min(gain.low_us, idle_ns / 1000), max(gain.high_us, idle_ns / 1000), view.window_us)
    spans = named(view.timeline, NAMES[cause], Kind.ANNOTATION, Kind.OPERATOR, Kind.PYTHON, Kind.OTHER)
    yield Finding(
        id=name,
        title=title,
        claim=(
            f"The device is idle for {idle_ns / 1e6:,.1f} ms ({percent(idle_ns / 1000 / view.window_us)} of the "
            f"window) while the host {what} ({len(during)} times, the longest "
            f"{(during.ends - during.starts).max() / 1e6:,.1f} ms)."
        ),
        cause_class=cause_class,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, spans, f"idle during them: {idle_ns / 1e6:,.1f} ms"),),
        recoverable=gain,
        fix=fix,
        verify="The longest steps shorten by these pauses; the median step stays.",
        falsified_by="The pauses go and the steps in which they lay stay as long.",
    )


def _pauses(view: RankView) -> Iterator[Finding]:
    """Host silences in some steps only, while the device is idle: what a collector or the system takes."""
    if len(view.steps) < 3:
        return
    timeline = view.timeline
    speaks = timeline.kinds(Kind.OPERATOR, Kind.RUNTIME, Kind.PYTHON)
    long_notes = timeline.kinds(Kind.ANNOTATION) & (timeline.duration_ns < PAUSE_NS)
    silence = timeline.intervals(speaks | long_notes).gaps_in(*view.window)
    silence = silence & view.idle.by_cause[HOST]
    long = silence.ends - silence.starts > PAUSE_NS
    pauses = Intervals(silence.starts[long], silence.ends[long])
    struck = sum(bool((pauses & Intervals.union_of([s.window[0]], [s.window[1]])).total_ns()) for s in view.steps)
    total = pauses.total_ns() / 1000
    if not len(pauses) or 2 * struck > len(view.steps) or total < WORTH * view.window_us:
        return
    yield Finding(
        id="host-pause",
        title="The host stands still in some steps",
        claim=(
            f"In {struck} of {len(view.steps)} steps the host calls nothing for {total / 1000 / len(pauses):,.0f} ms "
            "on average while the device is idle: garbage collection, the system, or another process took it."
        ),
        cause_class=CauseClass.HOST,
        confidence=Confidence.MEDIUM,
        evidence=(
            Evidence(
                view.trace.file,
                (),
                len(pauses),
                "silences of the host: no operator, call or Python function",
                (view.trace.rank,),
                int(pauses.starts[0]) / 1000,
                int(pauses.ends[-1]) / 1000,
            ),
        ),
        recoverable=Recoverable.of_window(total / 2, total, view.window_us),
        fix=Fix(
            "Schedule garbage collection (gc.disable(), gc.collect(1) every N steps), pin processes to cores, and look "
            "at what else runs on the host."
        ),
        verify="Profile with record_python_gc_info, or log gc.callbacks: pauses and collections must coincide.",
        falsified_by="Collections are off and the pauses remain.",
    )


def _launch_bound(view: RankView) -> Iterator[Finding]:
    idle_ns = view.idle.by_cause[HOST].total_ns()
    if idle_ns / 1000 < LAUNCH_BOUND * view.window_us:
        return
    graph, timeline = view.graph, view.timeline
    known = Intervals.union_of([], [])
    for cause in HostCause:
        known = known | host_intervals(timeline, cause)
    work = np.maximum(graph.before, 0) - graph.host_within(timeline, known)
    work = np.where(graph.on_device, 0, np.maximum(work, 0))
    calls = np.where(graph.on_device | graph.blocks, 0, graph.duration)
    gain = between(
        view,
        Change(host_ns=work // 4, call_ns=calls // 4),
        Change(host_ns=work, call_ns=calls),
    )
    kernels = timeline.kinds(Kind.COMPUTE)
    short = float((timeline.duration_ns[kernels] < SHORT_NS).mean()) if kernels.any() else 0.0
    gain = Recoverable.of_window(gain.low_us, min(gain.high_us, idle_ns / 1000), view.window_us)
    if not is_worth(gain, view.window_us):
        return
    if view.computes_on_host:
        yield _python_bound(view, idle_ns / 1000, gain)
        return
    yield Finding(
        id="launch-bound",
        title="The host launches more slowly than the device computes",
        claim=(
            f"The device waits {per_step(view, idle_ns / 1000)} ({percent(idle_ns / 1000 / view.window_us)} of the "
            f"window) for its next kernel to be launched; {percent(short)} of the kernels take less than 10 us."
        ),
        cause_class=CauseClass.HOST,
        confidence=Confidence.HIGH,
        evidence=(
            evidence_of(view, kernels, f"{int(kernels.sum()) / view.step_count:,.0f} kernels a step"),
            evidence_of(view, timeline.kinds(Kind.OPERATOR), "operators of the host between the launches"),
        ),
        recoverable=gain,
        fix=Fix(
            "torch.compile the blocks (mode reduce-overhead for CUDA graphs), fuse optimizer and norms, or give each "
            "step more work: a larger micro-batch.",
            {"run.compile": True},
        ),
        verify="Idle time by host_launch falls, and the time from launch to start grows beyond 10 us.",
        falsified_by="A step with twice the micro-batch takes twice as long: then the device is what limits.",
    )


def _python_bound(view: RankView, idle_us: float, gain: Recoverable) -> Finding:
    kernels = view.timeline.kinds(Kind.COMPUTE)
    return Finding(
        id="python-bound",
        title="Python between the operators keeps the CPU from computing",
        claim=(
            f"Nothing computes for {per_step(view, idle_us)} ({percent(idle_us / view.window_us)} of the window) while "
            f"the thread goes from one of {int(kernels.sum()) / view.step_count:,.0f} operators a step to the next."
        ),
        cause_class=CauseClass.HOST,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, kernels, "operators, with what lies between them"),),
        recoverable=gain,
        fix=Fix(
            "torch.compile the blocks, or give each operator more work: a larger micro-batch.", {"run.compile": True}
        ),
        verify="Idle time by host_launch falls with the number of operators.",
        falsified_by="A step with twice the micro-batch takes twice as long: then the operators are what limits.",
    )


def _warm_up(view: RankView) -> Iterator[Finding]:
    if len(view.steps) < 3:
        return
    lengths = np.array([step.window[1] - step.window[0] for step in view.steps], dtype=float)
    others = float(np.median(lengths[1:]))
    lazy = named(view.timeline, _LAZY, Kind.OVERHEAD, Kind.RUNTIME)
    if lengths[0] < WARM_UP * others:
        return
    first = view.steps[0]
    yield Finding(
        id="warm-up-step",
        title="The first recorded step is a warm-up",
        claim=(
            f"Step {first.number} takes {lengths[0] / 1e6:,.1f} ms, the others {others / 1e6:,.1f} ms: modules load, "
            "algorithms are chosen. Means over all steps are not those of the training."
        ),
        cause_class=CauseClass.PROFILER,
        confidence=Confidence.HIGH if lazy.any() else Confidence.MEDIUM,
        evidence=(
            Evidence(
                view.trace.file,
                (f"ProfilerStep#{first.number}",),
                1,
                f"{int(lazy.sum())} events of lazy loading in the trace",
                (view.trace.rank,),
                first.window[0] / 1000,
                first.window[1] / 1000,
            ),
        ),
        recoverable=None,
        fix=Fix("Let the profiler's schedule skip it: schedule(wait=1, warmup=2, active=3)."),
        verify="With more warm-up steps all recorded steps take the same.",
        falsified_by="Later steps of the run are as long as this one.",
    )
