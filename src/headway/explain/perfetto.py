"""All ranks of a report on one clock, with its findings as a lane, as a trace for Perfetto."""

from pathlib import Path

import numpy as np

from headway.errors import UserError
from headway.explain.input import InputKind
from headway.explain.kineto import rank_in_name, read_rank
from headway.explain.report import Report
from headway.timeline import Kind, Timeline, concatenate, write_chrome_trace

FINDINGS_LANE = "findings"


def write_perfetto(report: Report, path: Path) -> None:
    """Write the traces of ``report``, their clocks brought together as far as collectives tell how far they are apart.

    Raises UserError when no input is a trace, and OSError when the disk does not take the file.
    """
    rank_of = {str(rank["file"]): int(rank["rank"]) for rank in report.explained.ranks if "file" in rank}
    offsets = (report.explained.details.get("collectives") or {}).get("clock_offset_us", {})
    timelines = []
    for one in report.inputs:
        if one.kind is not InputKind.KINETO or str(one.path) not in rank_of:
            continue
        for trace in read_rank(one.path, rank_in_name(one.path)):
            rank = rank_of[str(one.path)] if not trace.rank_is_known else trace.rank
            shift = round(1000 * offsets.get(str(rank), 0))
            timelines.append(_shifted(trace.timeline, rank, shift))
    if not timelines:
        raise UserError("--perfetto: none of the inputs is a trace with device events, so there is nothing to draw")
    write_chrome_trace(concatenate([*timelines, _findings(report)]), path)


def _shifted(timeline: Timeline, rank: int, shift_ns: int) -> Timeline:
    columns = {name: getattr(timeline, name) for name in timeline.__dataclass_fields__ if name != "strings"}
    columns |= {"rank": np.full(len(timeline), rank), "start_ns": timeline.start_ns - shift_ns}
    return Timeline.of_columns(columns, timeline.strings, len(timeline))


def _findings(report: Report) -> Timeline:
    """One span for each piece of evidence that has a time, on its rank."""
    spans = [
        (evidence.ranks[0] if evidence.ranks else -1, evidence.start_us, evidence.end_us, finding.title)
        for finding in report.explained.findings
        for evidence in finding.evidence
        if evidence.start_us is not None and evidence.end_us is not None
    ]
    return Timeline.of(
        kind=[Kind.ANNOTATION] * len(spans),
        start_ns=[round(1000 * start) for _, start, _, _ in spans],
        duration_ns=[max(round(1000 * (end - start)), 0) for _, start, end, _ in spans],
        rank=[rank for rank, *_ in spans],
        lane=[FINDINGS_LANE] * len(spans),
        name=[title for *_, title in spans],
    )
