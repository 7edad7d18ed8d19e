"""The allocator: memory that is given back to the device and asked for again within steps."""

import re
from collections.abc import Iterator

import numpy as np

from headway.explain.finding import CauseClass, Confidence, Finding, Fix
from headway.explain.host import named
from headway.explain.pathologies.evidence import evidence_of, is_worth, per_step, without_waiting
from headway.explain.rank_view import RankView
from headway.timeline import Kind

_FREE = re.compile(r"^(cuda|hip)(Free|MemUnmap|MemRelease)$")
_ASK = re.compile(r"^(cuda|hip)(Malloc|MemCreate|MemMap)$")


def find_memory(view: RankView) -> Iterator[Finding]:
    """Findings about the allocator of one rank."""
    timeline = view.timeline
    freed, asked = named(timeline, _FREE, Kind.RUNTIME), named(timeline, _ASK, Kind.RUNTIME)
    inside = (timeline.start_ns >= view.window[0]) & (timeline.start_ns < view.window[1])
    freed, asked = freed & inside, asked & inside
    if not freed.any() or not asked.any():
        return
    calls = freed | asked
    spent = int(timeline.duration_ns[calls].sum()) / 1000
    gain = view.graph.gain(without_waiting(view, calls))
    if not is_worth(gain, view.window_us):
        return
    steps = len(np.unique(timeline.step[freed]))
    yield Finding(
        id="allocator-retries",
        title="The allocator gives memory back and asks for it again",
        claim=(
            f"{int(freed.sum())} cudaFree and {int(asked.sum())} cudaMalloc within the window, in {steps} steps: "
            f"{per_step(view, spent)}. cudaFree waits for the whole device: the allocator found no block that fits "
            "and emptied its cache."
        ),
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH if steps > 1 else Confidence.MEDIUM,
        evidence=(evidence_of(view, freed, "memory given back"), evidence_of(view, asked, "memory asked for")),
        recoverable=gain,
        fix=Fix(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; lower the peak (smaller micro-batch, checkpointing), "
            "fixed shapes."
        ),
        verify="num_alloc_retries stays 0 and no cudaFree lies within a step.",
        falsified_by="The calls belong to the first step alone.",
    )
