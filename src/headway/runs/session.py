"""What the last session of a run measured once it was under way: the medians that a prediction is held to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from headway.runs.run_directory import read_events, read_metrics

WARM_UP_STEPS = 10
"""Steps of a session that are not measured: first allocations, first files, clocks. Of a short session half."""
PROFILED = "profiled"
"""The event of a trace that was written; ``steps``: the first under the profiler, and the one at hand when it was."""
SESSION = ("started", "resumed")
"""Events that a session begins with."""


@dataclass(frozen=True)
class Measured:
    """Of one session of a run, all ranks together; None where it is not known."""

    ranks: int
    lines: int
    """Of ``metrics.jsonl``, each the mean of the steps since the one before; numbers here are medians of them."""
    step_time_s: float
    """Seconds of a step, its wait for data left out."""
    low_s: float
    high_s: float
    """Quartiles of it."""
    data_wait_share: float
    """Of the whole time."""
    samples_per_s: float | None
    """Waits for data left out, as in all rates here."""
    tokens_per_s: float | None
    tflops_per_device: float | None
    mfu: float | None
    peak_memory_gib: float | None
    """Of the first rank."""


def measured(run: Path) -> Measured | None:
    """Read what ``run``'s last session measured after its warm-up; None when it did not come that far."""
    turns = [event for event in read_events(run) if event["kind"] in SESSION]
    if not turns:
        return None
    first = int(turns[-1]["step"])
    lines = [line for line in read_metrics(run) if line["step"] >= first and line.get("step_time_s") is not None]
    profiled = [tuple(event["steps"]) for event in read_events(run) if event["kind"] == PROFILED]
    lines = _under_way(lines, first, profiled)
    if not lines:
        return None
    seconds = [_busy_s(line) for line in lines]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    waited, whole = (sum(line[key] for line in lines) for key in ("data_wait_s", "step_time_s"))
    return Measured(
        ranks=int(turns[-1]["ranks"]),
        lines=len(lines),
        step_time_s=median(seconds),
        low_s=low,
        high_s=high,
        data_wait_share=waited / whole,
        samples_per_s=_rate(lines, "samples_per_s"),
        tokens_per_s=_rate(lines, "tokens_per_s"),
        tflops_per_device=_rate(lines, "tflops_per_device"),
        mfu=_rate(lines, "mfu"),
        peak_memory_gib=_of(lines, "peak_memory_gib", max, lambda line: 1.0),
    )


def _under_way(lines: list[dict[str, Any]], first: int, profiled: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Lines none of whose steps belongs to the warm-up of a session that began with step ``first``.

    Nor to steps that were ``profiled``, or beside which a trace was written, (first, last); as long as others are left.
    """
    if not lines:
        return []
    warm = first + min(WARM_UP_STEPS, (lines[-1]["step"] + 1 - first) // 2)
    begins = [first, *(line["step"] + 1 for line in lines)]
    warmed = [(begin, line) for begin, line in zip(begins, lines, strict=False) if begin >= warm]
    plain = [line for begin, line in warmed if all(line["step"] < start or begin > last for start, last in profiled)]
    return plain or [line for _, line in warmed]


def _busy_s(line: dict[str, Any]) -> float:
    return max(line["step_time_s"] - line["data_wait_s"], 1e-9)


def _rate(lines: list[dict[str, Any]], key: str) -> float | None:
    """Median of a rate, counted over the time that was not waited for data."""
    return _of(lines, key, median, lambda line: line["step_time_s"] / _busy_s(line))


def _of(
    lines: list[dict[str, Any]],
    key: str,
    choose: Callable[[list[float]], float],
    factor: Callable[[dict[str, Any]], float],
) -> float | None:
    values = [line[key] * factor(line) for line in lines if line.get(key) is not None]
    return choose(values) if values else None
