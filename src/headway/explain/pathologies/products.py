"""Matrix products whose shapes keep the device from its peak: too few rows for the bytes that they read."""

from collections.abc import Iterator

import numpy as np

from headway.cluster import accelerator_of_device
from headway.explain.finding import CauseClass, Confidence, Finding, Fix
from headway.explain.kernels import device_name, precision_of
from headway.explain.pathologies.evidence import between, evidence_of, is_worth, less_device_time, per_step, percent
from headway.explain.rank_view import RankView
from headway.timeline import Kind

THIN = 0.5
"""A product that does less than this share of the FLOPs a byte that the peak needs is bound by memory."""
WORTH_TELLING = 0.1
"""Share of the window in such products."""


def find_products(view: RankView) -> Iterator[Finding]:
    """Findings about products whose shapes the trace has, on a device whose peaks are known."""
    accelerator = accelerator_of_device(device_name(view.trace.facts))
    if accelerator is None:
        return
    timeline = view.timeline
    known = np.flatnonzero(timeline.kinds(Kind.COMPUTE) & (timeline.flops > 0) & (timeline.bytes > 0))
    intensity = timeline.flops[known] / timeline.bytes[known]
    ridge = np.full(len(known), np.nan)
    keys = np.stack([timeline.name[known], timeline.dtype[known]])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    for number, (name, dtype) in enumerate(distinct.T.tolist()):
        peak = accelerator.peak_tflops(precision_of(timeline.strings[name], timeline.strings[dtype]))
        if peak is not None:
            ridge[which.ravel() == number] = 1000 * peak / accelerator.memory_bandwidth_gb_per_s
    share = intensity / ridge
    thin = np.zeros(len(timeline), dtype=bool)
    thin[known[share < THIN]] = True
    spent = int(timeline.duration_ns[thin].sum()) / 1000
    if spent < WORTH_TELLING * view.window_us:
        return
    # With many more rows the same bytes would serve them all, and the peak were what is left of a product's time.
    wasted = float(np.average(1 - share[share < THIN], weights=timeline.duration_ns[known[share < THIN]]))
    gain = between(view, less_device_time(view, thin, wasted / 2), less_device_time(view, thin, wasted))
    if not is_worth(gain, view.window_us):
        return
    typical = float(np.median(intensity[share < THIN]))
    yield Finding(
        id="thin-products",
        title="Matrix products are too thin for this device",
        claim=(
            f"{int(thin.sum()) / view.step_count:,.0f} products a step ({per_step(view, spent)}, "
            f"{percent(spent / view.window_us)} of the window) do {typical:,.0f} FLOPs a byte (median) where the "
            f"{accelerator.name} needs {np.nanmedian(ridge[share < THIN]):,.0f} for its peak: they read weights for "
            "few rows, and wait for memory."
        ),
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.MEDIUM,
        evidence=(evidence_of(view, thin, f"{spent / 1000:,.2f} ms, by the shapes of their operands"),),
        recoverable=gain,
        fix=Fix(
            "Give each product more rows: a larger micro-batch or longer sequences in fewer accumulated ones, packed "
            "samples, less tensor parallelism. The gain is a sample's, not a step's."
        ),
        verify="Samples a second rise, and FLOPs a byte of the products with the micro-batch.",
        falsified_by="A step with twice the micro-batch takes twice as long.",
    )
