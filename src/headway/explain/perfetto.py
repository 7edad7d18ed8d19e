"""All ranks of a report on one clock, with its findings as a lane, as a trace for Perfetto."""

from pathlib import Path

import numpy as np

from headway.errors import UserError
from headway.explain.report import Report
from headway.explain.report_traces import traces_of
from headway.timeline import Kind, Timeline, concatenate, write_chrome_trace

FINDINGS_LANE = "findings"


def write_perfetto(report: Report, path: Path) -> None:
    """Write the traces of ``report``, their clocks brought together as far as collectives tell how far they are apart.

    Raises UserError when no input is a trace, and OSError when the disk does not take the file.
    """
    timelines = [_shifted(trace.timeline, trace.rank, ahead_ns) for trace, ahead_ns in traces_of(report)]
    if not timelines:
        raise UserError(
            "--perfetto: none of the inputs is a profiler trace with device events: there is nothing to draw"
        )
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
