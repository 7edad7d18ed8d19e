"""From logs to health, findings, and the throughput of each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.explain.finding import Explained, Finding, HealthMessage, Severity
from headway.explain.input import Input
from headway.explain.logs.findings import series_findings
from headway.explain.logs.read import read_log
from headway.explain.logs.series import Series
from headway.explain.reading import read_each, side_by_side

FEWEST_ROWS = 8
"""Of a log whose times are to be judged."""


def explain_logs(inputs: Sequence[Input]) -> Explained:
    """Explain logs, each on its own. Raises UserError when none can be read."""
    series, unread = read_each(inputs, read_log)
    return side_by_side((explained(one, series_findings(one), "logs") for one in series), unread)


def explained(series: Series, findings: Sequence[Finding], named: str) -> Explained:
    """One log's health, findings, and its times among the details ``named``."""
    return Explained(tuple(series_health(series)), (), tuple(findings), {named: [series_as_json(series)]})


def series_health(series: Series) -> list[HealthMessage]:
    """What must be known before a log's findings are believed."""
    found = []
    rows = len(series.rows)
    if rows < FEWEST_ROWS:
        text = f"{series.path.name} tells of {rows} steps only: nothing is said of its times"
        found.append(HealthMessage("few-steps", Severity.NOTE, text, str(series.path)))
    elif not np.isfinite(series.pace).any():
        text = f"{series.path.name} tells neither times nor rates, and its lines have no time stamps"
        found.append(HealthMessage("no-times", Severity.NOTE, text, str(series.path)))
    if series.warm_up:
        text = f"the first {series.warm_up} rows of {series.path.name} are warm-up and left out of all times"
        found.append(HealthMessage("warm-up", Severity.NOTE, text, str(series.path)))
    return found


def series_as_json(series: Series) -> dict[str, Any]:
    """Steps, and the spread of their times after the warm-up."""
    settled = slice(series.warm_up, None)
    return {
        "file": str(series.path),
        "trainer": series.trainer,
        "rows": len(series.rows),
        "first_step": series.rows[0].step if series.rows else None,
        "last_step": series.rows[-1].step if series.rows else None,
        "warm_up_rows": series.warm_up,
        "step_time_s": _spread(series.step_s[settled]),
        "tokens_per_s": _spread(series.column("tokens_per_s")[settled]),
        "samples_per_s": _spread(series.column("samples_per_s")[settled]),
        "memory_gib": _spread(series.column("memory_gib")),
    }


def _spread(values: np.ndarray[Any, Any]) -> dict[str, float] | None:
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, middle, high = np.percentile(known, [10, 50, 90]).tolist()
    return {"p10": low, "median": middle, "p90": high}
