"""The exact time budget of a rank and of each of its steps."""

import re
from typing import Any

import numpy as np

from headway.explain.rank_view import RankView
from headway.timeline import Breakdown, Kind
from headway.timeline.collectives import KERNEL_FAMILIES, is_communication

KNOWN_COMPUTE = re.compile(
    r"at::|at_cuda|cub::|thrust::|cudnn|cutlass|cublas|gemm|gemv|triton|flash|fmha|attention|attn|elementwise|reduce"
    r"|softmax|norm|conv|winograd|Cijk|miopen|ck::|transpose|SubTensorOp|embedding|fbgemm|splitK|magma|adam|optimizer"
    r"|scatter|gather|sort|scan|copy|cast|fill|rotary|rope|silu|gelu|swiglu|topk|moe|permute|fft|dropout|pool|bn_",
    re.I,
)
"""Kernels whose name says that they compute."""


def budget_json(view: RankView) -> dict[str, Any]:
    """The budget of one rank as the report holds it: microseconds, of the window from first to last device span.

    ``communication_by`` tells how communication was recognised; ``unclassified`` are kernels beside the main stream
    whose names say neither that they compute nor that they communicate: they count as compute.
    """
    timeline, whole = view.timeline, view.whole
    return {
        "rank": view.trace.rank,
        "file": view.trace.file,
        **_times(whole),
        "idle_by_cause_us": _in_us(view.idle.total_ns()),
        "communication_by_us": _recognised(view),
        "exposed_communication_by_us": _exposed_by(view),
        "unclassified": _unclassified(view),
        "kernels": int(timeline.kinds(Kind.COMPUTE, Kind.COMMUNICATION).sum()),
        "steps": [
            {"step": step.number, **_times(view.within(step.window))}
            | {"idle_by_cause_us": _in_us(view.idle.total_ns(step.window))}
            for step in view.steps
        ],
    }


def _times(part: Breakdown) -> dict[str, Any]:
    return {
        "window_us": part.window_ns / 1000,
        "busy_us": part.busy_ns / 1000,
        "idle_us": part.idle_ns / 1000,
        "compute_us": part.compute_ns / 1000,
        "communication_us": part.communication_ns / 1000,
        "exposed_communication_us": part.exposed_communication_ns / 1000,
        "exposed_communication_versus_compute_or_memory_us": part.alone_communication_ns / 1000,
        "memory_us": part.memory_ns / 1000,
        "overlap_percent": part.overlap_percent,
    }


def _in_us(nanoseconds: dict[str, int]) -> dict[str, float]:
    return {name: value / 1000 for name, value in nanoseconds.items()}


def _recognised(view: RankView) -> dict[str, float]:
    """Kernel time of communication by what told it: the family of its name, or its link to a collective alone."""
    timeline = view.timeline
    talks = timeline.kinds(Kind.COMMUNICATION)
    found: dict[str, float] = {}
    for place in np.unique(timeline.name[talks]).tolist():
        name = timeline.strings[place]
        family = next((family for family, pattern in KERNEL_FAMILIES.items() if pattern.search(name)), "")
        family = family if is_communication(name) else "linked to a collective"
        spent = int(timeline.duration_ns[talks & (timeline.name == place)].sum())
        found[family] = found.get(family, 0.0) + spent / 1000
    return found


def _exposed_by(view: RankView) -> dict[str, float]:
    """Exposed communication by mesh axis, or process group, or stream, as far as the trace tells them, and collective.

    A moment in which two of them communicate counts for both.
    """
    timeline = view.timeline
    talks = np.flatnonzero(timeline.kinds(Kind.COMMUNICATION))
    keys: dict[str, list[int]] = {}
    for span in talks.tolist():
        axis, group = timeline.strings[timeline.axis[span]], timeline.strings[timeline.group[span]]
        place = axis or (f"group {group}" if group else timeline.strings[timeline.lane[span]])
        collective = timeline.strings[timeline.collective[span]] or "communication"
        keys.setdefault(f"{place}: {collective}", []).append(span)
    return {
        key: (timeline.intervals(np.array(spans)) - view.compute).total_ns() / 1000
        for key, spans in sorted(keys.items())
    }


def _unclassified(view: RankView) -> dict[str, Any]:
    timeline = view.timeline
    computes = np.flatnonzero(timeline.kinds(Kind.COMPUTE))
    unknown_names = [
        place
        for place in np.unique(timeline.name[computes]).tolist()
        if not KNOWN_COMPUTE.search(timeline.strings[place])
    ]
    lanes, where = np.unique(timeline.lane[computes], return_inverse=True)
    if not len(lanes):
        return {"share_of_busy": 0.0, "kernels": []}
    spent = np.bincount(where, weights=timeline.duration_ns[computes].astype(float))
    beside = timeline.lane[computes] != lanes[int(spent.argmax())]
    unknown = computes[beside & np.isin(timeline.name[computes], unknown_names)]
    names, counts = np.unique(timeline.name[unknown], return_counts=True)
    most = sorted(zip(counts.tolist(), (timeline.strings[name] for name in names.tolist()), strict=True), reverse=True)
    covered = timeline.intervals(unknown).total_ns()
    return {
        "share_of_busy": covered / view.whole.busy_ns if view.whole.busy_ns else 0.0,
        "kernels": [{"name": name, "count": count} for count, name in most[:10]],
    }
