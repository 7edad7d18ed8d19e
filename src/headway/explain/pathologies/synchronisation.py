"""Hosts that wait for the device within a step: scalars that are read, shapes that depend on data, logging."""

import re
from collections.abc import Iterator

import numpy as np

from headway.explain.finding import CauseClass, Confidence, Finding, Fix
from headway.explain.host import blocking_calls
from headway.explain.pathologies.evidence import (
    calls_during,
    evidence_of,
    is_worth,
    operators,
    per_step,
    spans_of,
    without_waiting,
)
from headway.explain.rank_view import RankView
from headway.timeline import Intervals
from headway.timeline.intervals import Mask

ITEM = re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero|equal)$")
DATA_DEPENDENT = re.compile(r"^aten::(nonzero|masked_select|unique\w*|_unique2|argwhere|repeat_interleave)$")
LOGGING = re.compile(r"\b(log(ging|ger|_metrics)?|metrics?|clip_grad_norm_?|grad_?norm|progress)\b", re.I)
WAITED = 0.02
"""Share of the window that a host may wait in such calls before it is told, whatever the replay says is lost by it."""


def find_synchronisation(view: RankView) -> Iterator[Finding]:
    """Findings about synchronisation of one rank."""
    items, shapes = operators(view, ITEM), operators(view, DATA_DEPENDENT)
    logging = spans_of(view, operators(view, LOGGING))
    of_logging = items & logging.contains(view.timeline.start_ns)
    within_shapes = spans_of(view, shapes)
    plain = items & ~of_logging & ~within_shapes.contains(view.timeline.start_ns)
    yield from _finding(
        view,
        plain,
        "item-synchronisation",
        "Scalars are read from the device within the step",
        "are read with .item() (or float(), bool(), an if on a tensor)",
        Fix(
            "Keep the values on the device (torch.where, foreach reductions) or read them once every N steps; "
            'torch.cuda.set_sync_debug_mode("warn") names the lines.'
        ),
    )
    yield from _finding(
        view,
        shapes,
        "nonzero-synchronisation",
        "Shapes that depend on data make the host wait",
        "need the device's answer for a shape (nonzero, boolean index, unique)",
        Fix("Use masks of fixed shape: torch.where, index with known sizes, padding to a bound."),
    )
    yield from _finding(
        view,
        of_logging,
        "logging-synchronisation",
        "Metrics are read from the device in every step",
        "are read for logging, metrics or the gradient norm",
        Fix("Log every N steps, and keep sums of metrics on the device until then.", {"metrics.every": 10}),
    )


def _finding(view: RankView, spans: Mask, name: str, title: str, what: str, fix: Fix) -> Iterator[Finding]:
    if not spans.any():
        return
    during = spans_of(view, spans)
    blocks = calls_during(view, during) & blocking_calls(view.timeline, view.launches)
    if not blocks.any():
        return
    gain = view.graph.gain(without_waiting(view, blocks))
    outer = _outermost(view, spans, during)
    waited = during.total_ns() / 1000
    worth = is_worth(gain, view.window_us)
    if not worth and waited < WAITED * view.window_us:
        return
    yield Finding(
        id=name,
        title=title,
        claim=(
            f"{outer} values {what}: the host waits {per_step(view, waited)} for the device to catch up, and what it "
            "would have launched meanwhile comes late."
            + ("" if worth else " The device has other work most of that time: little of it is lost by this alone.")
        ),
        cause_class=CauseClass.SYNCHRONISATION,
        confidence=Confidence.HIGH if worth else Confidence.MEDIUM,
        evidence=(
            evidence_of(view, spans, f"{waited / 1000:,.2f} ms in all"),
            evidence_of(view, blocks, "calls within them that wait for the device"),
        ),
        recoverable=gain,
        fix=fix,
        verify="The calls are gone from the step, and kernels are queued again (launch to start grows).",
        falsified_by="Removing the reads leaves the step as long: the host had nothing to launch meanwhile.",
    )


def _outermost(view: RankView, spans: Mask, during: Intervals) -> int:
    """How many there are that do not lie within another of them."""
    return len(np.intersect1d(view.timeline.start_ns[spans], during.starts))
