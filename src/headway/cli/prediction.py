"""The prediction that a run stores before its first step, made by a process beside its first rank."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Self

from headway.cluster import cluster_of, cluster_toml
from headway.errors import RunFailed
from headway.recipe import Recipe, to_toml
from headway.runs import PREDICTED, RunDirectory, replace_text, writing

PATIENCE_S = 120.0
"""That training waits for its prediction, once the ranks are ready, and at most half of what a collective waits."""
WRONG_INPUT = 2
"""Exit code of the process for what can't be predicted as the user wants it."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
"""Environment variables that would make a process believe that it is one of the ranks."""


class PredictionBeside:
    """Predicts a run while its ranks start. A context manager that leaves no process behind.

    Nothing that goes wrong here stops a run: it is told as an event.
    """

    def __init__(self, recipe: Recipe, cluster: str, devices: int) -> None:
        self._recipe = recipe
        self._cluster = cluster_of(cluster)
        self._directory = RunDirectory(recipe.run.directory)
        self._late: tuple[int, Callable[..., None]] | None = None
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._timeline = tempfile.NamedTemporaryFile(suffix=".json.gz")  # noqa: SIM115
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.predict_run", cluster, str(devices), self._timeline.name],
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._err,
            text=True,
            env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C asks the ranks to stop, and they end this
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as recipe_there:
            recipe_there.write(to_toml(recipe))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Store a prediction that came after training had begun; end one that never came."""
        if self._late is not None and self._process.poll() is not None:
            self._ended(*self._late)
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._err.close()
        self._timeline.close()

    def before_first_step(self, step: int, event: Callable[..., None]) -> None:
        """Store the prediction and ``cluster.toml`` before ``step`` is taken, and tell it by ``event``."""
        for file in (self._directory.prediction_file, self._directory.predicted_step_file):
            file.unlink(missing_ok=True)  # of an earlier session, perhaps in another layout
        patience = min(PATIENCE_S, self._recipe.run.timeout_s / 2)
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._late = (step, event)
            message = f"the prediction takes longer than {patience:.0f} s: training does not wait for it"
            event("prediction_late", step=step, message=message)
            return
        self._ended(step, event)

    def _ended(self, step: int, event: Callable[..., None]) -> None:
        """Store what the process came to, or tell why it failed."""
        try:
            if self._process.returncode == 0:
                event(PREDICTED, step=step, file=str(self._directory.prediction_file), message=self._store())
                return
            reason = self._complaint()
        except RunFailed as failure:
            reason = str(failure)
        event("prediction_failed", step=step, message=f"there is no prediction of this run: {reason}")

    def _store(self) -> str:
        """Write the files, and return in words what was predicted. Raises RunFailed when the disk refuses them."""
        self._out.seek(0)
        text = self._out.read()
        file = self._directory.predicted_step_file
        with writing(file):
            hidden = file.with_name(f".{file.name}")
            shutil.copyfile(self._timeline.name, hidden)
            os.replace(hidden, file)
        replace_text(self._directory.prediction_file, text)
        replace_text(self._directory.cluster_file, cluster_toml(self._cluster))
        time = json.loads(text)["prediction"]["step_time_s"]
        return f"predicted: {time['value']:.4g} s a step ({time['low']:.4g} to {time['high']:.4g})"

    def _complaint(self) -> str:
        """What the process said before it failed: a user's mistake whole, of a traceback the last line."""
        self._err.seek(0)
        lines = self._err.read().strip().splitlines() or [f"exit code {self._process.returncode}"]
        return "; ".join(lines) if self._process.returncode == WRONG_INPUT else lines[-1]
