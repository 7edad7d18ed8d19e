"""Where a run's numbers and pictures go: metrics.jsonl, and TensorBoard, W&B and MLflow when asked for."""

import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headway.errors import UserError
from headway.recipe import Recipe, to_toml
from headway.runs import RunDirectory, append_line
from headway.train.writer_thread import CLOSE_TIMEOUT_S, Writer, WriterThread

METRICS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "step_time_s",
    "data_wait_s",
    "samples",
    "tokens",
    "tokens_per_s",
    "samples_per_s",
    "tflops_per_device",
    "mfu",
    "hfu",
    "peak_memory_gib",
)
"""Keys of every training line of ``metrics.jsonl``; null where a value is not known.

``samples`` and ``tokens`` count what the whole run has trained on, all ranks together, and the rates are global too;
``step_time_s`` and ``data_wait_s`` are means over the steps since the line before; ``tflops_per_device`` and ``mfu``
count model FLOPs, ``hfu`` what was executed, recomputation included.
"""

PACKAGES = {
    "tensorboard": ("tensorboard", "torch.utils.tensorboard"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Modules that each writer needs."""


class MetricsWriters:
    """Writes each line to ``metrics.jsonl`` and to the writers of ``recipe.metrics``; on ranks other than 0, nowhere.

    ``next_step`` is the first step of this process (a resumed run goes on with the same TensorBoard, W&B and MLflow
    run). A writer that fails is told by ``on_event``, as in WriterThread, and left out from then on; RunFailed is
    raised only where ``metrics.jsonl`` can't be written.
    """

    def __init__(
        self, recipe: Recipe, directory: RunDirectory, on_event: Callable[..., None], next_step: int = 0
    ) -> None:
        self._file = directory.metrics_file
        self._active = directory.rank == 0
        makers: dict[str, Callable[[Recipe, RunDirectory, int], Writer]] = {
            "tensorboard": TensorBoardWriter,
            "wandb": WandbWriter,
            "mlflow": MlflowWriter,
        }
        asked = dict.fromkeys(recipe.metrics.writers) if self._active else ()
        self._writers = [
            WriterThread(name, partial(makers[name], recipe, directory, next_step), on_event) for name in asked
        ]

    def training(self, fields: Mapping[str, Any]) -> None:
        """Write the line of a training step: ``METRICS`` (missing ones become null) and what else ``fields`` has."""
        self._write(dict.fromkeys(METRICS) | dict(fields))

    def validation(self, steps_done: int, loss: float, **fields: Any) -> None:
        """Write a validation loss measured after ``steps_done`` steps, as ``validation_loss``."""
        self._write({"step": steps_done, "validation_loss": loss, **fields})

    def picture(self, steps_done: int, name: str, file: Path) -> None:
        """Hand a picture (PNG) of the weights after ``steps_done`` steps to the writers that show pictures."""
        for writer in self._writers:
            writer.call(lambda to: to.picture(steps_done, name, file))

    def close(self) -> None:
        """Flush and close all writers."""
        for writer in self._writers:
            writer.close()

    def _write(self, line: dict[str, Any]) -> None:
        if not self._active:
            return
        append_line(self._file, line)
        values = {
            key: float(value)
            for key, value in line.items()
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for writer in self._writers:
            writer.call(lambda to: to.scalars(line["step"], values))


def require_installed(recipe: Recipe) -> None:
    """Raise UserError when a writer of ``recipe.metrics.writers`` misses a package.

    The packages are imported here and not by the writers' threads: data workers that are forked meanwhile would
    inherit half of an import.
    """
    for name in recipe.metrics.writers:
        for package in PACKAGES[name]:
            try:
                import_module(package)
            except ImportError as error:
                raise UserError(
                    f"metrics.writers asks for {name!r}, but {package} is not installed ({error}): "
                    f"pip install 'headway[{name}]', or take {name!r} out of metrics.writers"
                ) from None


class TensorBoardWriter:
    """TensorBoard event files in the run directory; points of steps that run again are purged."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, next_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory.tensorboard), purge_step=next_step or None, flush_secs=10)
        if next_step == 0:
            self._writer.add_text("recipe", "```toml\n" + to_toml(recipe) + "```")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write each number as a scalar of its name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, file: Path) -> None:
        """Write the picture under ``name``."""
        self._writer.add_image(name, _pixels(file), step, dataformats="HWC")

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandbWriter:
    """Weights & Biases: offline unless WANDB_MODE says otherwise or this machine is logged in."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, next_step: int) -> None:
        import wandb

        # W&B waits for itself when the process ends: by default for a minute and a half.
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
        decided = os.environ.get("WANDB_MODE") or wandb.login(prompt=False)
        self._run = wandb.init(
            project=recipe.metrics.project,
            name=directory.path.name,
            id=_remembered(directory.path / "wandb" / "run_id", lambda: uuid.uuid4().hex),
            resume="allow",
            dir=str(directory.path),
            config=recipe.model_dump(mode="json"),
            mode=None if decided else "offline",
            settings=wandb.Settings(silent=True, console="off", finish_timeout=CLOSE_TIMEOUT_S),
        )
        # W&B's own step may only rise; a resumed run writes steps again that a killed one had written.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step."""
        self._run.log({"step": step, **values})

    def picture(self, step: int, name: str, file: Path) -> None:
        """Write the picture under ``name``."""
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(file))})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowWriter:
    """MLflow: the server named by MLFLOW_TRACKING_URI, else a SQLite file in the run directory."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, next_step: int) -> None:
        from mlflow import MlflowClient

        folder = (directory.path / "mlflow").resolve()
        folder.mkdir(exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(recipe.metrics.project)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(
                recipe.metrics.project, artifact_location=None if server else (folder / "artifacts").as_uri()
            )
        )
        self._run_id = _remembered(
            folder / "run_id",
            lambda: self._client.create_run(experiment_id, run_name=directory.path.name).info.run_id,
        )
        self._client.update_run(self._run_id, status="RUNNING")
        self._client.log_text(self._run_id, to_toml(recipe), "recipe.toml")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step in one request."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[Metric(name, v, now_ms, step) for name, v in values.items()])

    def picture(self, step: int, name: str, file: Path) -> None:
        """Write the picture file as an artifact."""
        self._client.log_artifact(self._run_id, str(file), artifact_path=name)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _pixels(file: Path) -> np.ndarray:
    """A picture file as uint8 (H, W, 3)."""
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def _remembered(file: Path, make: Callable[[], str]) -> str:
    """The text of ``file``, made the first time: what a resumed run goes on with."""
    known = file.read_text() if file.exists() else ""
    if not known:
        known = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(known)
    return known
