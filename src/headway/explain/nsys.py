"""Nsight Systems exports (sqlite), each device a rank: numbered and explained together."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from headway.explain.finding import Explained, HealthMessage, Severity
from headway.explain.input import Input
from headway.explain.kineto import rank_in_name
from headway.explain.nsys_export import read_nsys
from headway.explain.rank_trace import RankTrace
from headway.explain.reading import read_each
from headway.explain.timelines import explain_timelines
from headway.timeline import DEVICE_KINDS, UNKNOWN, Kind, Timeline, launches_of


def explain_nsys(inputs: Sequence[Input]) -> Explained:
    """Explain all exports of a run, each device as a rank. Raises UserError when none can be read."""
    exports, told = read_each(inputs, read_nsys, Severity.FAILED)
    traces = [trace for export in exports for trace in export]
    whole = []
    for trace in _numbered(traces):
        timeline, in_flight = _without_launches_in_flight(trace.timeline)
        whole.append(replace(trace, timeline=timeline))
        if in_flight:
            text = f"the kernels of the last {in_flight} launches come after the recording's end: those are left out"
            told.append(HealthMessage("launches-in-flight", Severity.NOTE, text, trace.file, (trace.rank,)))
    explained = explain_timelines(whole)
    return replace(explained, health=(*told, *explained.health))


def _numbered(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Distinct ranks: those in the files' names where each file has one device, else counted over files and devices."""
    named = [rank_in_name(Path(trace.file)) for trace in traces]
    known = UNKNOWN not in named and len(set(named)) == len(named)
    devices = [trace.rank for trace in traces]
    counted = devices if len(set(devices)) == len(devices) else list(range(len(traces)))
    return [
        replace(
            trace,
            rank=rank,
            rank_is_known=known,
            timeline=replace(trace.timeline, rank=np.broadcast_to(np.int32(rank), len(trace.timeline))),
        )
        for rank, trace in zip(named if known else counted, traces, strict=True)
    ]


def _without_launches_in_flight(timeline: Timeline) -> tuple[Timeline, int]:
    """The Timeline without its last launches, whose kernels are not recorded any more, and how many those are."""
    launching = [text for text in timeline.strings if "Launch" in text]
    launches = timeline.kinds(Kind.RUNTIME) & timeline.matching("name", launching)
    launched = launches_of(timeline)[timeline.kinds(*DEVICE_KINDS)]
    seen = launched[launched >= 0]
    if not len(seen):
        return timeline, 0
    in_flight = launches & (timeline.start_ns > timeline.start_ns[seen].max())
    return timeline.select(~in_flight), int(in_flight.sum())
