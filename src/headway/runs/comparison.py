"""Predicted beside measured: what ``prediction.json`` of a run said, and what the run's steps then came to."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.runs.run_directory import RunDirectory, read_events
from headway.runs.session import SESSION, Measured, measured

PREDICTED = "predicted"
"""The event of a session whose prediction was stored before its first step."""


@dataclass(frozen=True)
class Compared:
    """One number: what was predicted, the range that should hold four of five measurements, and what was measured."""

    name: str
    unit: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether what was measured lies in the range."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Comparison:
    """All numbers of a run's last session."""

    cluster: str
    rows: tuple[Compared, ...]
    measured: Measured


def read_prediction(run: Path) -> dict[str, Any] | None:
    """``prediction.json`` of ``run``; None when it has none. Raises UserError for a damaged one."""
    file = RunDirectory(run).prediction_file
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("an object was expected")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} can't be read as a prediction ({error}): delete it") from None
    return found


def prediction_of_last_session(run: Path) -> dict[str, Any] | None:
    """``prediction.json`` of ``run`` where it is of the run's last session; None when that had none.

    Raises UserError for damaged files.
    """
    turns = [event["kind"] for event in read_events(run) if event["kind"] in (*SESSION, PREDICTED)]
    return read_prediction(run) if turns and turns[-1] == PREDICTED else None


def compare(run: Path, sample_name: str) -> Comparison | None:
    """The last session of ``run`` beside its prediction; None when it had none or measured nothing.

    ``sample_name``: of what a sample is called. A prediction of an earlier session, perhaps of another layout, does not
    count. Raises UserError for damaged files.
    """
    prediction = prediction_of_last_session(run)
    if prediction is None:
        return None
    found = measured(run)
    if found is None:
        return None
    try:
        rows = tuple(_rows(prediction, found, sample_name))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        file = RunDirectory(run).prediction_file
        raise UserError(f"{file} is no prediction of headway train ({error!r}): delete it") from None
    return Comparison(prediction["cluster"], rows, found)


def _rows(told: dict[str, Any], found: Measured, sample_name: str) -> list[Compared]:
    """Rates have the range of the step's time, turned over."""
    prediction, ranks = told["prediction"], told["devices"]
    time = prediction["step_time_s"]
    rows = [Compared("step time", "s", time["value"], time["low"], time["high"], found.step_time_s)]
    memory = told["first_rank_peak_memory_gib"]
    if found.peak_memory_gib:
        ends = (memory["value"], memory["low"], memory["high"])
        rows.append(Compared("peak memory", "GiB", *ends, found.peak_memory_gib))

    def rate(name: str, predicted: float | None, measured_rate: float | None) -> None:
        if predicted and measured_rate:
            faster, slower = (predicted * time["value"] / time[end] for end in ("low", "high"))
            rows.append(Compared(name, "", predicted, slower, faster, measured_rate))

    rate(f"{sample_name}/s", ranks * prediction["samples_per_s_per_device"], found.samples_per_s)
    rate("tokens/s", ranks * prediction["tokens_per_s_per_device"], found.tokens_per_s)
    rate("TFLOP/s a device", prediction["tflops_per_device"], found.tflops_per_device)
    peak = told["peak_tflops"]
    own = found.mfu if found.mfu is not None else found.tflops_per_device and peak and found.tflops_per_device / peak
    rate("MFU", prediction["mfu"], own)
    return rows
