"""Tables of runs that were tried (tsv, csv): what each change was worth, beyond noise and without confounding.

A row is compared with the best kept run of the same work before it. Work is what decides tokens a second without being
a speed-up: sequence length, batch, what is logged, a profiler that runs along. Noise is what repeats of a run differ
by, or what the table itself calls noise.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.explain.finding import CauseClass, Confidence, Evidence, Explained, Finding, Fix, HealthMessage, Severity
from headway.explain.input import Input
from headway.explain.logs.explain import series_as_json, series_health
from headway.explain.logs.findings import series_findings
from headway.explain.logs.formats import of_fields
from headway.explain.logs.series import Row, Series
from headway.explain.logs.work import command_flags, work_of
from headway.explain.reading import read_each, side_by_side

ASSUMED_NOISE = 0.02
"""Where the table holds no repeat and calls nothing noise."""
_DISTURBED = 0.10
"""A repeat that differs by more tells of a disturbed machine, not of noise."""
_LARGEST_BYTES = 64 << 20
_RATES = (
    "tokens_per_sec",
    "tokens_per_s",
    "tokens_per_second",
    "tps",
    "throughput",
    "samples_per_sec",
    "samples_per_s",
)
_REPEATS = re.compile(r"\b(repeat|re-?run|exact repeat|repeat-confirm)\b", re.I)
_SAME_AS_REFERENCE = re.compile(r"within noise|no-op", re.I)
_KEPT = re.compile(r"^(keep|kept|best|accept|ok)", re.I)


@dataclass(frozen=True)
class Trial:
    """One row of a table."""

    line: int
    rate: float
    """Throughput in the table's unit; 0 when the run failed."""
    kept: bool | None
    """The table says that the change was kept; None when it says nothing of that."""
    description: str
    flags: Mapping[str, str]
    """Of its command line."""
    work: frozenset[str]
    """What it does that others may not: ``batch size 8``, ``profiler``."""


@dataclass(frozen=True)
class Judged:
    """A row beside the one it is compared with."""

    trial: Trial
    reference: Trial
    gain: float
    """Relative to the reference; of its work alone where ``confounded`` is empty."""
    confounded: tuple[str, ...]
    """What differs in the work."""
    repeat: bool


def explain_tables(inputs: Sequence[Input]) -> Explained:
    """Explain tables, each on its own. Raises UserError when none can be read."""
    parts, unread = read_each(inputs, _explain)
    return side_by_side(parts, unread)


def _explain(path: Path) -> Explained:
    rows = _rows(path)
    columns = {str(name).strip().lower(): name for name in rows[0] if name}
    if "step" in columns or "global_step" in columns:
        return _explain_steps(path, rows)
    rate = next((columns[name] for name in _RATES if name in columns), None)
    if rate is None:
        raise UserError(
            f"{path}: no column of the table is a throughput ({', '.join(_RATES[:4])}, …) and none a step: name one so"
        )
    trials = [_trial(number, row, rate, columns) for number, row in enumerate(rows, 2)]
    return _judge(path, [trial for trial in trials if trial is not None])


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise UserError(f"{path}: larger than {_LARGEST_BYTES >> 20} MiB: that is no table of runs")
        text = path.read_text(encoding="utf-8-sig", errors="replace").replace("\0", "")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    lines = text.splitlines()
    separator = "\t" if lines and "\t" in lines[0] else ","
    try:
        rows = list(csv.DictReader(lines, delimiter=separator, quoting=csv.QUOTE_NONE if separator == "\t" else 0))
    except csv.Error as error:
        raise UserError(f"{path}: not a table that can be read ({error})") from None
    if not rows:
        raise UserError(f"{path}: the table has no row")
    return rows


def _explain_steps(path: Path, rows: Sequence[Mapping[str, Any]]) -> Explained:
    """A table of steps, as Lightning's CSVLogger writes it, is a log."""
    found = []
    for number, row in enumerate(rows, 2):
        fields = {str(key).strip().lower(): value for key, value in row.items() if key}
        for key in ("step", "global_step"):
            if str(fields.get(key, "")).strip().isdigit():
                fields[key] = int(str(fields[key]).strip()[:18])
        parsed = of_fields({key: value for key, value in fields.items() if value != ""})
        if parsed is not None and parsed[0] is not None and parsed[1]:
            found.append(Row(number, parsed[0], parsed[1]))
    if not found:
        raise UserError(f"{path}: no row of the table tells a step with a loss or a time")
    series = Series(path, "table", found, [])
    return Explained(
        tuple(series_health(series)), (), tuple(series_findings(series)), {"logs": [series_as_json(series)]}
    )


def _trial(line: int, row: Mapping[str, Any], rate: str, columns: Mapping[str, str]) -> Trial | None:
    told = str(row.get(rate) or "").replace(",", "").strip()
    if not re.fullmatch(r"\d{1,15}(\.\d+)?", told):
        return None
    status = str(row.get(columns.get("status", "")) or "").strip()
    text = str(row.get(columns.get("description", "")) or "").strip()
    flags = command_flags(str(row.get(columns.get("command", "")) or ""))
    failed = re.match(r"crash|fail|oom|error", status, re.I) is not None
    return Trial(
        line=line,
        rate=0.0 if failed else float(told),
        kept=bool(_KEPT.match(status)) if status else None,
        description=text,
        flags=flags,
        work=work_of(flags, text),
    )


def _judge(path: Path, trials: Sequence[Trial]) -> Explained:
    ran = [trial for trial in trials if trial.rate > 0]
    if len(ran) < 2:
        raise UserError(f"{path}: fewer than two rows tell a throughput: there is nothing to compare")
    noise, source = _noise(ran)
    judged = _judged(ran, noise)
    health = [HealthMessage("noise", Severity.NOTE, f"differences within {noise:.1%} are noise: {source}", str(path))]
    if failed := len(trials) - len(ran):
        text = f"{failed} of {len(trials)} rows have no throughput (crashed or empty) and are left out"
        health.append(HealthMessage("failed-rows", Severity.NOTE, text, str(path)))
    findings = [
        _gains(path, ran[0], judged, noise),
        _confounded(path, judged, noise),
        _within_noise(path, judged, noise),
        _disturbed(path, judged),
    ]
    details = {"file": str(path), "noise": noise, "rows": [_as_json(one, noise) for one in judged]}
    return Explained(tuple(health), (), tuple(finding for finding in findings if finding), {"tuning": [details]})


def _judged(ran: Sequence[Trial], noise: float) -> list[Judged]:
    """Each row after the first beside the best kept row of the same work before it, or else the best of other work."""
    best: dict[frozenset[str], Trial] = {ran[0].work: ran[0]}
    judged = []
    for trial in ran[1:]:
        reference = best.get(trial.work)
        overall = max(best.values(), key=lambda known: known.rate)
        against = reference or overall
        confounded = () if reference else tuple(sorted(trial.work ^ against.work))
        gain = trial.rate / against.rate - 1
        judged.append(Judged(trial, against, gain, confounded, repeat=_is_repeat(trial, against)))
        kept = trial.kept if trial.kept is not None else gain > noise
        if kept and (reference is None or gain > 0):
            best[trial.work] = trial
    return judged


def _is_repeat(trial: Trial, reference: Trial) -> bool:
    return _REPEATS.search(trial.description) is not None and trial.flags == reference.flags


def _noise(ran: Sequence[Trial]) -> tuple[float, str]:
    """How far runs differ that should be the same, and how that is known."""
    judged = _judged(ran, ASSUMED_NOISE)
    repeats = [abs(one.gain) for one in judged if one.repeat and abs(one.gain) < _DISTURBED]
    if repeats:
        return max(repeats), f"{len(repeats)} repeats differ by up to that"
    named = [abs(one.gain) for one in judged if _SAME_AS_REFERENCE.search(one.trial.description)]
    named = [gain for gain in named if gain < _DISTURBED]
    if named:
        return max(named), f"{len(named)} rows that the table itself calls noise or no change differ by up to that"
    return ASSUMED_NOISE, "assumed, for the table holds no repeat"


def _gains(path: Path, baseline: Trial, judged: Sequence[Judged], noise: float) -> Finding | None:
    """The kept changes of the same work that were worth more than noise."""
    worth = [one for one in judged if not one.confounded and one.trial.kept is not False and one.gain > noise]
    if not worth:
        return None
    best = max((one.trial for one in worth), key=lambda trial: trial.rate)
    listed = "; ".join(f"{one.gain:+.1%} {one.trial.description[:80]}" for one in worth)
    largest = max(worth, key=lambda one: one.gain)
    changed = {key: value for key, value in best.flags.items() if baseline.flags.get(key) != value}
    how = " ".join(f"--{key}={value}" if value else f"--{key}" for key, value in changed.items())
    return Finding(
        id="tuning-gains",
        title=f"{len(worth)} changes were worth more than noise: {baseline.rate:,.0f} to {best.rate:,.0f}",
        claim=f"Of {len(judged)} trials in {path.name} these beat the best before by more than {noise:.1%}: {listed}.",
        cause_class=CauseClass.TUNING,
        confidence=Confidence.HIGH,
        evidence=tuple(_evidence(path, one) for one in sorted(worth, key=lambda one: -one.gain)[:8]),
        recoverable=None,
        fix=Fix(f"Keep the settings of line {best.line}" + (f": {how}" if how else f": {best.description}")),
        verify="Three repeats of the baseline and of that row, alternating: their medians differ as claimed",
        falsified_by=f"A repeat of the largest ({largest.trial.description[:60]}) gains nothing",
    )


def _confounded(path: Path, judged: Sequence[Judged], noise: float) -> Finding | None:
    """Rows whose work differs, whatever their throughput says."""
    others = [one for one in judged if one.confounded]
    if not others:
        return None
    faster = [one for one in others if one.gain > noise]
    what = sorted({name for one in others for name in one.confounded})
    return Finding(
        id="tuning-confounded",
        title=f"{len(others)} trials do other work ({', '.join(what[:4])}): their throughput is no comparison",
        claim=f"{len(others)} rows of {path.name} change the sequence length, the batch, the logging or the profiler. "
        f"{len(faster)} of them look faster than the best before them and are not counted as a speed-up.",
        cause_class=CauseClass.TUNING,
        confidence=Confidence.HIGH,
        evidence=tuple(_evidence(path, one) for one in [*faster, *(one for one in others if one not in faster)][:8]),
        recoverable=None,
        fix=Fix("Repeat the reference with the same change of work, and compare with that"),
        verify="Both runs of a pair have the same sequence length, batch, logging and profiler",
        falsified_by="The tokens that count (not padding) a second, measured over the same samples, rise as well",
    )


def _within_noise(path: Path, judged: Sequence[Judged], noise: float) -> Finding | None:
    kept = [
        one for one in judged if one.trial.kept and not one.confounded and not one.repeat and abs(one.gain) <= noise
    ]
    if not kept:
        return None
    return Finding(
        id="tuning-within-noise",
        title=f"{len(kept)} kept changes lie within the noise of {noise:.1%}",
        claim=f"Kept in {path.name}, but not told apart from no change at all: "
        + "; ".join(f"{one.gain:+.1%} {one.trial.description[:80]}" for one in kept)
        + ".",
        cause_class=CauseClass.TUNING,
        confidence=Confidence.HIGH,
        evidence=tuple(_evidence(path, one) for one in kept[:8]),
        recoverable=None,
        fix=Fix("Repeat each against its reference a few times, alternating, before building on it"),
        verify="The medians of repeats differ by more than their spread",
        falsified_by="Many repeats show a small difference of constant sign",
    )


def _disturbed(path: Path, judged: Sequence[Judged]) -> Finding | None:
    odd = [one for one in judged if one.repeat and not one.confounded and abs(one.gain) >= _DISTURBED]
    if not odd:
        return None
    rates = "; ".join(
        f"{one.trial.rate:,.0f} in line {one.trial.line}, {one.reference.rate:,.0f} before" for one in odd
    )
    return Finding(
        id="tuning-disturbed",
        title=f"{len(odd)} repeats of the same run differ by {max(abs(one.gain) for one in odd):.0%}",
        claim=f"The same settings gave {rates}: something else slowed the machine, and may have slowed other rows.",
        cause_class=CauseClass.TUNING,
        confidence=Confidence.MEDIUM,
        evidence=tuple(_evidence(path, one) for one in odd[:8]),
        recoverable=None,
        fix=Fix("Repeat every row that was judged slow by as much; look for throttling or other jobs on the node"),
        verify="Repeats agree to within a few percent",
        falsified_by="The repeat differs in something that the table does not tell",
    )


def _evidence(path: Path, one: Judged) -> Evidence:
    differs = f"; other work: {', '.join(one.confounded)}" if one.confounded else ""
    return Evidence(
        file=str(path),
        events=(f"line {one.trial.line}", f"line {one.reference.line}"),
        count=1,
        text=f"{one.trial.rate:,.0f} against {one.reference.rate:,.0f} ({one.gain:+.1%}): {one.trial.description[:120]}"
        + differs,
    )


def _as_json(one: Judged, noise: float) -> dict[str, Any]:
    if one.confounded:
        verdict = "confounded"
    elif one.repeat:
        verdict = "repeat"
    elif abs(one.gain) <= noise:
        verdict = "noise"
    else:
        verdict = "faster" if one.gain > 0 else "slower"
    return {
        "line": one.trial.line,
        "reference_line": one.reference.line,
        "rate": one.trial.rate,
        "gain": one.gain,
        "verdict": verdict,
        "confounded_by": list(one.confounded),
        "kept": one.trial.kept,
        "description": one.trial.description,
    }
