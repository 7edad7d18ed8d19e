"""Data that comes too late: a loader that stalls the step, copies from memory that is not pinned."""

import re
from collections.abc import Iterator

from headway.explain.finding import CauseClass, Confidence, Finding, Fix, Recoverable
from headway.explain.host import NAMES, HostCause, host_intervals, named
from headway.explain.pathologies.evidence import (
    both,
    calls_during,
    evidence_of,
    is_worth,
    less_device_time,
    less_host_time,
    per_step,
    percent,
    spans_of,
    without_waiting,
)
from headway.explain.rank_view import RankView
from headway.timeline import Intervals, Kind

EXPOSED_COPIES = 0.05
"""Share of the window from which copies that nothing hides are told."""
_TO_DEVICE = re.compile(r"HtoD|Host.?to.?Device", re.I)
_WITH_HOST = re.compile(r"HtoD|DtoH|Host.?to.?Device|Device.?to.?Host", re.I)
_PAGEABLE = re.compile(r"(Memcpy HtoD|CopyHostToDevice).*Pageable", re.I)
AFTER_COPY_NS = 20_000
"""A synchronisation that begins within this after the copy's call belongs to it."""


def find_data(view: RankView) -> Iterator[Finding]:
    """Findings about data of one rank."""
    yield from _loader_stall(view)
    yield from _pageable_copies(view)
    yield from _exposed_copies(view)


def _loader_stall(view: RankView) -> Iterator[Finding]:
    idle_ns = view.idle.by_cause[HostCause.DATA.value].total_ns()
    waits = host_intervals(view.timeline, HostCause.DATA)
    gain = view.graph.gain(less_host_time(view, waits))
    gain = Recoverable.of_window(min(gain.low_us, idle_ns / 1000), gain.high_us, view.window_us)
    if not is_worth(gain, view.window_us) or idle_ns / 1000 < 0.5 * gain.high_us:
        return
    spans = named(view.timeline, NAMES[HostCause.DATA], Kind.ANNOTATION, Kind.OPERATOR, Kind.PYTHON)
    share = idle_ns / 1000 / view.window_us
    yield Finding(
        id="data-loader-stall",
        title="The data loader stalls the step",
        claim=(
            f"The device is idle for {per_step(view, idle_ns / 1000)} ({percent(share)} of the window) while the "
            f"training thread waits for its next batch ({per_step(view, waits.total_ns() / 1000)} in the loader)."
        ),
        cause_class=CauseClass.DATA,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, spans, f"idle during them: {idle_ns / 1e6:,.1f} ms in all"),),
        recoverable=gain,
        fix=Fix(
            "Load in worker processes ahead of the step: more workers, deeper prefetch, persistent workers, pinned "
            "memory; decode on the device or cache what is decoded.",
            {"data.workers": 8, "data.prefetch": 4},
        ),
        verify="Time in the loader's next falls to about nothing and idle time by data_wait with it.",
        falsified_by="The same step with one batch repeated from memory takes as long.",
    )


def _pageable_copies(view: RankView) -> Iterator[Finding]:
    copies = named(view.timeline, _PAGEABLE, Kind.MEMORY)
    if not copies.any():
        return
    calls = view.launches[copies]
    calls = calls[calls >= 0]
    starts, ends = view.timeline.start_ns[calls], view.timeline.end_ns[calls]
    near = Intervals.union_of(starts, ends + AFTER_COPY_NS)
    change = both(without_waiting(view, calls_during(view, near)), less_device_time(view, copies, 1.0))
    gain = view.graph.gain(change)
    if not is_worth(gain, view.window_us):
        return
    spent = int(view.timeline.duration_ns[copies].sum()) / 1000
    blocked = int(view.timeline.duration_ns[calls_during(view, near)].sum()) / 1000
    yield Finding(
        id="pageable-copy",
        title="Batches are copied from memory that is not pinned",
        claim=(
            f"{int(copies.sum())} copies to the device come from pageable memory: {per_step(view, spent)} of copying, "
            f"for which the host stands in calls for {per_step(view, blocked)} and launches nothing."
        ),
        cause_class=CauseClass.DATA,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, copies, f"{spent / 1000:,.2f} ms of copies, each blocking its thread"),),
        recoverable=Recoverable.of_window(0.5 * gain.low_us, gain.high_us, view.window_us),
        fix=Fix("Pin the batch (pin_memory=True) and copy with non_blocking=True, on a stream of its own."),
        verify="Copies are named Pinned -> Device, and run beside compute.",
        falsified_by="The copies overlap compute, or the step is as long when batches stay on the device.",
    )


def _exposed_copies(view: RankView) -> Iterator[Finding]:
    copies = named(view.timeline, _WITH_HOST, Kind.MEMORY)
    exposed_us = (spans_of(view, copies) - view.compute - view.communication).total_ns() / 1000
    if exposed_us < EXPOSED_COPIES * view.window_us:
        return
    gain = view.graph.gain(less_device_time(view, copies, 1.0))
    # Hidden behind other work they still take their own time; only what is not copied at all is saved whole.
    hidden_us = max(view.window_us - spans_of(view, copies).total_ns() / 1000, 0.0)
    to_device = int(view.timeline.duration_ns[copies & named(view.timeline, _TO_DEVICE)].sum())
    share = to_device / max(int(view.timeline.duration_ns[copies].sum()), 1)
    moved = view.timeline.bytes[copies]
    size = f", {int(moved[moved > 0].sum()) / 2**30:,.2f} GiB," if (moved > 0).any() else ""
    yield Finding(
        id="exposed-copies",
        title="Copies between host and device are not hidden",
        claim=(
            f"{int(copies.sum())} copies{size} take the device for {per_step(view, exposed_us)} "
            f"({percent(exposed_us / view.window_us)} of the window) in which it does nothing else; {percent(share)} "
            "of their time goes to the device."
        ),
        cause_class=CauseClass.DATA if share > 0.5 else CauseClass.MEMORY,
        confidence=Confidence.MEDIUM,
        evidence=(evidence_of(view, copies, f"{exposed_us / 1000:,.2f} ms with nothing beside them"),),
        recoverable=Recoverable.of_window(min(gain.low_us, hidden_us), max(gain.high_us, exposed_us), view.window_us),
        fix=Fix(
            "Copy on a stream of its own, one step ahead, from pinned memory; keep on the device what is used again; "
            "if states or activations are offloaded, offload less."
        ),
        verify="Copies run beside kernels, and the step is shorter by about the time they now take alone.",
        falsified_by="The next kernel needs what is copied and nothing else could run meanwhile: weights at start.",
    )
