"""The profiler as a cause: what it adds to the time that it records."""

from collections.abc import Iterator

from headway.explain.finding import CauseClass, Confidence, Finding, Fix, Recoverable
from headway.explain.host import HostCause
from headway.explain.pathologies.evidence import WORTH, evidence_of, percent
from headway.explain.rank_view import RankView
from headway.timeline import Kind


def find_profiler(view: RankView) -> Iterator[Finding]:
    """Findings about the profiler of one rank."""
    overhead = view.timeline.kinds(Kind.OVERHEAD)
    idle_us = view.idle.by_cause[HostCause.PROFILER.value].total_ns() / 1000
    if idle_us < WORTH * view.window_us:
        return
    yield Finding(
        id="profiler-artefact",
        title="The profiler itself takes time of the step",
        claim=(
            f"The device is idle for {idle_us / 1000:,.2f} ms ({percent(idle_us / view.window_us)} of the window) "
            "while the profiler asks for buffers, flushes them or loads functions: unprofiled steps are shorter by it."
        ),
        cause_class=CauseClass.PROFILER,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, overhead, f"{idle_us / 1000:,.2f} ms idle during them"),),
        recoverable=Recoverable.of_window(0, 0, view.window_us),
        fix=Fix("Give the profiler warm-up steps, and leave stacks, shapes and memory off where they are not needed."),
        verify="Steps with and without the profiler take the same wall time.",
        falsified_by="Steps without the profiler are as long.",
    )
