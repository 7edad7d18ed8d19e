"""The optimizer's step: parameters updated one by one, gradients that are filled with zeros."""

import re
from collections.abc import Iterator

from headway.explain.finding import CauseClass, Confidence, Finding, Fix
from headway.explain.host import named
from headway.explain.pathologies.evidence import (
    between,
    both,
    evidence_of,
    is_worth,
    kernels_launched_during,
    less_device_time,
    less_host_time,
    per_step,
    spans_of,
)
from headway.explain.rank_view import RankView
from headway.timeline import Kind

MANY_KERNELS = 100
"""More kernels than that in one update: it is neither fused nor by lists of tensors."""
_STEP = re.compile(r"^Optimizer\.step#")
_ZERO = re.compile(r"^Optimizer\.zero_grad#")


def find_optimizer(view: RankView) -> Iterator[Finding]:
    """Findings about the optimizer of one rank."""
    yield from _one_by_one(view)
    yield from _zeros(view)


def _one_by_one(view: RankView) -> Iterator[Finding]:
    updates = named(view.timeline, _STEP, Kind.ANNOTATION, Kind.OPERATOR)
    if not updates.any() or view.computes_on_host:
        return
    during = spans_of(view, updates)
    kernels = kernels_launched_during(view, during)
    each = int(kernels.sum()) / int(updates.sum())
    if each < MANY_KERNELS:
        return
    host = less_host_time(view, during, 0.9)
    gain = between(view, host, both(host, less_device_time(view, kernels, 0.5)))
    if not is_worth(gain, view.window_us):
        return
    spent = during.total_ns() / 1000
    yield Finding(
        id="unfused-optimizer",
        title="The optimizer updates parameters one by one",
        claim=(
            f"An update launches {each:,.0f} kernels and takes {spent / 1000 / int(updates.sum()):,.2f} ms of the "
            "host; a fused one launches a few."
        ),
        cause_class=CauseClass.HOST,
        confidence=Confidence.HIGH,
        evidence=(
            evidence_of(view, updates, f"{spent / 1000:,.2f} ms of the host"),
            evidence_of(view, kernels, "kernels launched within"),
        ),
        recoverable=gain,
        fix=Fix("Construct the optimizer with fused=True (or foreach=True)."),
        verify="Optimizer.step launches a handful of fused or multi_tensor_apply kernels.",
        falsified_by="The device is busy with earlier kernels throughout the update, so that the step stays as long.",
    )


def _zeros(view: RankView) -> Iterator[Finding]:
    zeroing = named(view.timeline, _ZERO, Kind.ANNOTATION, Kind.OPERATOR)
    if not zeroing.any():
        return
    during = spans_of(view, zeroing)
    kernels = kernels_launched_during(view, during)
    if int(kernels.sum()) < 2 * int(zeroing.sum()):
        return
    gain = view.graph.gain(both(less_host_time(view, during), less_device_time(view, kernels, 1.0)))
    if not is_worth(gain, view.window_us):
        return
    spent = during.total_ns() / 1000
    yield Finding(
        id="zero-grad-writes",
        title="Gradients are filled with zeros",
        claim=(
            f"zero_grad fills {int(kernels.sum()) / int(zeroing.sum()):,.0f} gradients with zeros, for "
            f"{per_step(view, spent)} of the host; without gradients backward writes instead of adding, too."
        ),
        cause_class=CauseClass.HOST,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, zeroing, f"{spent / 1000:,.2f} ms"), evidence_of(view, kernels, "fills")),
        recoverable=gain,
        fix=Fix("optimizer.zero_grad(set_to_none=True), which is the default since PyTorch 2.0."),
        verify="zero_grad launches nothing.",
        falsified_by="The fills run while the host waits for something else, and the step stays as long.",
    )
