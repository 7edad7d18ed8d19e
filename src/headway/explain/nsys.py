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
from headway.timeline import UNKNOWN


def explain_nsys(inputs: Sequence[Input]) -> Explained:
    """Explain all exports of a run, each device as a rank. Raises UserError when none can be read."""
    traces, told = read_ranks(inputs)
    explained = explain_timelines(traces)
    return replace(explained, health=(*told, *explained.health))


def read_ranks(inputs: Sequence[Input]) -> tuple[list[RankTrace], list[HealthMessage]]:
    """The devices of all exports, numbered, and what could not be read. Raises UserError when that is all."""
    exports, told = read_each(inputs, read_nsys, Severity.FAILED)
    return _numbered([trace for export in exports for trace in export]), told


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
