"""A finished run in a few numbers, read from its run directory."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from headway.recipe import Recipe
from headway.runs.run_directory import read_events, read_metrics

LAST_LINES = 10
"""The last loss is the mean of this many lines (or half of all, when they are fewer): one step's loss is noisy."""


@dataclass(frozen=True)
class RunSummary:
    """What a run came to; None where it is not known. Rates are medians over the lines, global over all ranks."""

    steps: int
    samples: int | None
    loss_first: float | None
    loss_last: float | None
    validation_first: float | None
    validation_last: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    tflops_per_device: float | None
    mfu: float | None
    hfu: float | None
    data_wait_share: float | None
    """Seconds waited for data over seconds of all steps."""
    peak_memory_gib: float | None
    skipped_steps: int
    bad_records: int


def summarise(run: Path) -> RunSummary:
    """Read ``run``'s metrics and events."""
    lines, events = read_metrics(run), read_events(run)
    training = [line for line in lines if "validation_loss" not in line]
    losses = _known(training, "loss")
    last = max(1, min(LAST_LINES, len(losses) // 2))
    validation = _known(lines, "validation_loss")
    step_time = sum(_known(training, "step_time_s"))
    kinds = [event.get("kind") for event in events]
    samples = _known(training, "samples")
    return RunSummary(
        steps=int(training[-1]["step"]) + 1 if training else 0,
        samples=int(samples[-1]) if samples else None,
        loss_first=losses[0] if losses else None,
        loss_last=fmean(losses[-last:]) if losses else None,
        validation_first=validation[0] if validation else None,
        validation_last=validation[-1] if validation else None,
        samples_per_s=_median(training, "samples_per_s"),
        tokens_per_s=_median(training, "tokens_per_s"),
        tflops_per_device=_median(training, "tflops_per_device"),
        mfu=_median(training, "mfu"),
        hfu=_median(training, "hfu"),
        data_wait_share=sum(_known(training, "data_wait_s")) / step_time if step_time else None,
        peak_memory_gib=max(_known(training, "peak_memory_gib"), default=None),
        skipped_steps=kinds.count("step_skipped"),
        bad_records=sum(len(event["records"]) for event in events if event.get("kind") == "bad_records"),
    )


def _known(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]


def _median(lines: list[dict[str, Any]], key: str) -> float | None:
    values = _known(lines, key)
    return median(values) if values else None


def sample_name(recipe: Recipe) -> str:
    """What a person calls the samples of a run."""
    return {"next_token": "sequences", "vision_language": "conversations"}.get(
        recipe.objective.kind, "images" if recipe.data.frames == 1 else "videos"
    )
