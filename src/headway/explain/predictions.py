"""Runs that kept a prediction and traces: where their steps differ from it, and whether by more than its range."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.errors import UserError
from headway.explain.finding import CauseClass, Confidence, Evidence, Explained, Finding, Fix, HealthMessage, Severity
from headway.explain.input import Input, InputKind
from headway.explain.kineto import rank_in_name, read_rank
from headway.explain.predicted_step import PlannedStep, beside_prediction
from headway.explain.rank_trace import RankTrace
from headway.runs import RunDirectory, measured, prediction_of_last_session
from headway.timeline import read_chrome_trace

MOST_TRACES = 16
"""Read for this of one run: those of the ranks that were predicted first."""


def explain_predictions(inputs: Sequence[Input]) -> Explained:
    """Of each run directory whose last session was predicted and has traces: ``planned`` in the details, a finding."""
    health: list[HealthMessage] = []
    findings: list[Finding] = []
    planned = []
    for run in (one.path for one in inputs if one.kind is InputKind.RUN_DIRECTORY):
        folder = RunDirectory(run).traces
        traces = [one.path for one in inputs if one.kind is InputKind.KINETO and folder in one.path.parents]
        try:
            if traces and (found := _planned(run, traces)) is not None:
                step, told = found
                planned.append({"run": str(run), "range_us": [told["low"] * 1e6, told["high"] * 1e6], **step.as_json()})
                findings += _outside(run, step, told)
        except UserError as error:
            health.append(HealthMessage("unreadable", Severity.WARNING, str(error), str(run)))
    return Explained(tuple(health), (), tuple(findings), {"planned": planned} if planned else {})


def _planned(run: Path, traces: Sequence[Path]) -> tuple[PlannedStep, dict[str, float]] | None:
    """The difference, and the step that was predicted with its range in seconds. Raises UserError."""
    prediction = prediction_of_last_session(run)
    file = RunDirectory(run).predicted_step_file
    if prediction is None or not file.exists():
        return None
    predicted = read_chrome_trace(file).timeline
    try:
        told = {key: float(prediction["prediction"]["step_time_s"][key]) for key in ("value", "low", "high")}
    except (KeyError, TypeError, ValueError) as error:
        file = RunDirectory(run).prediction_file
        raise UserError(f"{file} is no prediction of headway train ({error!r}): delete it") from None
    step = beside_prediction(predicted, told["value"] * 1e6, list(_read(traces, predicted.ranks())))
    return None if step is None else (step, told)


def _read(traces: Sequence[Path], first: Sequence[int]) -> Iterator[RankTrace]:
    """The ranks of ``traces``, those of ``first`` before others, as many as are read."""
    for path in sorted(traces, key=lambda path: rank_in_name(path) not in first)[:MOST_TRACES]:
        try:
            yield from read_rank(path, rank_in_name(path))
        except UserError:
            continue  # told by the report already


def _outside(run: Path, step: PlannedStep, told: dict[str, float]) -> Iterator[Finding]:
    """A finding when the run's own steps lie outside of the range that four of five should lie in."""
    session = measured(run)
    taken = step.measured_us / 1e6 if session is None else session.step_time_s
    if told["low"] <= taken <= told["high"]:
        return
    change = taken / told["value"] - 1
    yield Finding(
        id="not-as-predicted",
        title=f"A step takes {abs(change):.0%} {'longer' if change > 0 else 'less'} than predicted",
        claim=(
            f"{taken:.4g} s a step, predicted {told['value']:.4g} ({told['low']:.4g} to {told['high']:.4g}). "
            f"Of the profiled steps: {step.text}."
        ),
        cause_class=CauseClass.TUNING,
        confidence=Confidence.MEDIUM,
        evidence=(
            Evidence(
                str(RunDirectory(run).predicted_step_file),
                (),
                step.steps,
                "whole steps of the traces, held against the predicted one",
                step.ranks,
            ),
        ),
        recoverable=None,
        fix=Fix(
            f"Mend first what the other findings say of the run itself. For what is left, headway plan "
            f"{run / 'recipe.toml'} --calibrate-from {run} brings the cluster in line with this run."
        ),
        verify="The next run's step lies in the range of its prediction.",
        falsified_by="Steps without the profiler take as long as predicted.",
    )
