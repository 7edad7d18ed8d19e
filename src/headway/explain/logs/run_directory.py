"""Headway's own run directories: metrics and events read as a log, with what only they tell."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import UserError
from headway.explain.finding import (
    CauseClass,
    Confidence,
    Evidence,
    Explained,
    Finding,
    Fix,
    Recoverable,
)
from headway.explain.input import Input
from headway.explain.logs.explain import explained
from headway.explain.logs.findings import series_findings
from headway.explain.logs.formats import of_fields
from headway.explain.logs.series import Happening, Note, Row, Series
from headway.explain.reading import read_each, side_by_side
from headway.runs import read_events, read_metrics

_HAPPENINGS = {
    "checkpoint_started": Happening.CHECKPOINT,
    "resumed": Happening.RESTART,
    "step_skipped": Happening.SKIPPED_STEP,
}
"""By the ``kind`` of an event."""


def explain_run_directories(inputs: Sequence[Input]) -> Explained:
    """Explain runs, each on its own. Raises UserError when none can be read."""
    series, unread = read_each(inputs, read_run)
    return side_by_side((explained(one, _findings(one), "runs") for one in series), unread)


def _findings(series: Series) -> list[Finding]:
    found = series_findings(series)
    if all(finding.id != "log-checkpoint-stall" for finding in found) and (stall := _told_stalls(series)):
        found.append(stall)
    return found


def _told_stalls(series: Series) -> Finding | None:
    """Saving that the events themselves say to have stalled the training, where no slow row shows it."""
    saves = [note for note in series.notes if note.what is Happening.CHECKPOINT and note.seconds is not None]
    stalled = sum(note.seconds or 0.0 for note in saves)
    times = series.step_s
    trained = float((times * series.covered)[np.isfinite(times)].sum())
    if not saves or stalled < _STALLED_SHARE * (trained + stalled):
        return None
    share = stalled / (trained + stalled)
    return Finding(
        id="log-checkpoint-stall",
        title=f"Saving checkpoints stalls the training ({share:.1%} of the time)",
        claim=f"{len(saves)} saves held the training up for {stalled:.3g} s, beside {trained:.3g} s of steps.",
        cause_class=CauseClass.CHECKPOINT,
        confidence=Confidence.HIGH,
        evidence=(Evidence(str(series.path / "events.jsonl"), ("checkpoint_started",), len(saves), "their stall_s"),),
        recoverable=Recoverable.of_window(stalled * 5e5, stalled * 1e6, (trained + stalled) * 1e6),
        fix=Fix(
            "Save less often, or to a faster disk: the copy to the host is what stalls", {"checkpoint.every": 1000}
        ),
        verify="The sum of stall_s over the time of the steps falls",
        falsified_by="Saves that take as long to copy hold up nothing",
    )


_STALLED_SHARE = 0.01


def read_run(path: Path) -> Series:
    """The steps and events of a run directory. Raises UserError when its files can't be read or tell of no step."""
    rows: list[Row] = []
    notes: list[Note] = []
    for number, fields in enumerate(read_metrics(path), 1):
        parsed = of_fields(fields)
        if parsed is None or parsed[0] is None:
            continue
        if "validation_loss" in fields:
            notes.append(Note(number, Happening.VALIDATION, f"validation after {parsed[0]} steps", parsed[0]))
        else:
            rows.append(Row(number, parsed[0], parsed[1]))
    if not rows:
        raise UserError(f"{path / 'metrics.jsonl'}: no line tells of a training step")
    for fields in read_events(path):
        note = _note(fields, rows)
        if note is not None:
            notes.append(note)
    return Series(path, "Headway", rows, sorted(notes, key=lambda note: note.line))


def _note(fields: dict[str, Any], rows: Sequence[Row]) -> Note | None:
    """An event beside the row of its step, so that it stands where a log would have it."""
    what = _HAPPENINGS.get(str(fields.get("kind")))
    step = fields.get("step")
    if what is None or not isinstance(step, int) or isinstance(step, bool):
        return None
    if what is Happening.CHECKPOINT and step > rows[-1].step:
        return None  # that at the end, which a run must wait for
    line = next((row.line for row in rows if row.step >= step), rows[-1].line)
    seconds = fields.get("stall_s")
    return Note(
        line=line,
        what=what,
        text=f"{fields.get('kind')} at step {step} ({_when(fields.get('time'))})",
        step=step,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


def _when(time: Any) -> str:
    try:
        return datetime.fromisoformat(str(time)).strftime("%H:%M:%S")
    except ValueError:
        return "no time"
