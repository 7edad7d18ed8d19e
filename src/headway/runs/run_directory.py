"""The run directory: what a run leaves behind, and what a resumed run may find there."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.recipe import Recipe, load_recipe, to_toml
from headway.runs.json_lines import append_line, drop_torn_line, keep_lines, read_lines, replace_text

MAY_CHANGE = (
    "run.steps",
    "run.micro_batch",
    "run.directory",
    "run.compile",
    "run.device",
    "run.timeout_s",
    "layout",
    "memory",
    "metrics",
    "sample",
    "checkpoint",
    "precision.compute",
    "precision.reduce",
    "optim.lr",
    "optim.muon_lr",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
    "optim.clip_norm",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.decay_steps",
    "optim.min_lr_ratio",
    "optim.max_skipped_in_a_row",
    "ema.every",
    "ema.warmup",
    "model.path",
    "model.latents.path",
    "data.path",
    "data.validation_path",
    "data.workers",
    "data.prefetch",
    "data.max_bad_records",
    "data.cache",
)
"""Keys (or whole sections) that a resumed run may change: they say how, how long or how fast, or where a moved folder
lies now. Every other key decides which model, samples and state the checkpoint holds."""


@dataclass(frozen=True)
class Change:
    """A recipe key whose value differs from the stored run's; None: the key was or is not set."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


class RunDirectory:
    """The files of a run. Only rank 0 creates and writes; on other ranks the writing methods do nothing."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        self.recipe_file = path / "recipe.toml"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.prediction_file = path / "prediction.json"
        self.predicted_step_file = path / "predicted_step.json.gz"
        """The Timeline behind it."""
        self.cluster_file = path / "cluster.toml"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.tensorboard = path / "tensorboard"
        self.traces = path / "traces"
        self.trace_file = self.traces / f"rank_{rank}.json.gz"
        """Of this rank: the steps that were profiled last."""
        self.memory_file = self.traces / f"memory_rank_{rank}.pickle"
        self.report_file = path / "report.html"

    def create(self) -> None:
        """Make the folders, and repair what a killed writer tore. Raises UserError where that is not allowed."""
        if self.rank != 0:
            return
        folders, files = (self.path, self.checkpoints, self.samples), (self.metrics_file, self.events_file)
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.directory = {self.path}: cannot be created: {error.strerror}") from None
        for path in (*folders, *files):
            if path.exists() and not os.access(path, os.R_OK | os.W_OK):
                raise UserError(f"run.directory = {self.path}: this user may not read and write {path}")
        for file in files:
            drop_torn_line(file)

    def check(self, recipe: Recipe) -> None:
        """Raise UserError, on every rank, when ``recipe`` would bury checkpoints here or give them another meaning."""
        if not self.checkpoints.is_dir() or not any(self.checkpoints.iterdir()):
            return
        if not recipe.checkpoint.resume:
            raise UserError(
                f"{self.path} holds checkpoints of an earlier run, and checkpoint.resume = false would start over on "
                "top of them: set another run.directory, or checkpoint.resume = true to go on"
            )
        refused = [change for change in self._changes(recipe) if not _may_change(change.key)]
        if refused:
            lines = "\n".join(f"  {change}" for change in refused)
            raise UserError(
                f"{self.path} holds a run of another recipe; these keys decide what its checkpoint means and cannot "
                f"change on resume:\n{lines}\nput the old values back, or set another run.directory"
            )

    def open(self, recipe: Recipe, next_step: int = 0) -> list[Change]:
        """Make the directory, which ``check`` has passed, ready to go on with step ``next_step`` (0: from the start).

        Lines of ``metrics.jsonl`` of steps that will run again are cut off, and ``recipe.toml`` becomes ``recipe``.
        Returns (and records as an event) the keys that differ from the stored recipe.
        """
        if self.rank != 0:
            return []
        self.create()
        changes = self._changes(recipe)
        keep_lines(self.metrics_file, lambda line: _stays(line, next_step, recipe.run.steps))
        replace_text(self.recipe_file, to_toml(recipe))
        if changes:
            shown = [{"key": change.key, "old": change.old, "new": change.new} for change in changes]
            message = "the recipe has changed since the run began: " + "; ".join(map(str, changes))
            self.event("recipe_changed", step=next_step, changes=shown, message=message)
        return changes

    def finished_at(self) -> int | None:
        """Steps after which the run came to its end; None while it has not, or was started anew since."""
        turns = [event for event in read_events(self.path) if event["kind"] in ("started", "resumed", "finished")]
        return turns[-1]["step"] if turns and turns[-1]["kind"] == "finished" else None

    def newest_samples(self) -> Path | None:
        """The grid of the samples that were drawn last."""
        return max(self.samples.glob("step-*.png"), default=None)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to ``events.jsonl``: when (UTC), what (``kind``), and ``fields``. On disk when it returns."""
        if self.rank == 0:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            append_line(self.events_file, {"time": now, "kind": kind, **fields})

    def _changes(self, recipe: Recipe) -> list[Change]:
        return differences(load_recipe(self.recipe_file), recipe) if self.recipe_file.exists() else []


def differences(old: Recipe, new: Recipe) -> list[Change]:
    """The keys in which two recipes differ, in the recipe's order."""
    before, after = dict(_flat(old.model_dump(mode="json"))), dict(_flat(new.model_dump(mode="json")))
    keys = dict.fromkeys([*before, *after])
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl`` (``path``: the file, or the run directory)."""
    return read_lines(path / "metrics.jsonl" if path.is_dir() else path)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``events.jsonl`` (``path``: the file, or the run directory)."""
    return read_lines(path / "events.jsonl" if path.is_dir() else path)


def _stays(line: dict[str, Any], next_step: int, steps: int) -> bool:
    # A validation's step counts the steps done: the one at next_step judges the very weights that are resumed. After
    # the last step there is nothing but the validation to do again.
    return line["step"] < next_step or (line["step"] == next_step and 0 < next_step < steps and "loss" not in line)


def _may_change(key: str) -> bool:
    moved_encoder = key.startswith("model.text_encoders.") and key.endswith(".path")
    return moved_encoder or any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_CHANGE)


def _flat(table: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
