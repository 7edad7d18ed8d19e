"""A disk that fills up in the middle of a run: a clear line, no torn file, a run that goes on when there is room."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.recipe import load_recipe, to_toml
from headway.runs import read_events, read_metrics
from headway.runs.run_directory import RunDirectory
from headway.train.metrics import MetricsWriters
from runs import losses, run_to_end
from soak import soak
from test_launcher import DEADLINE_S, end_what_is_left, start
from test_run_directory import recipe
from tiny_recipes import image_folder, image_recipe, text_file, text_recipe


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield disk
    end_what_is_left(tmp_path / "recipe.toml")
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, pages_left: int = 0) -> Path:
    """A file that takes all room there is but for some pages of 4096 bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - 4096 * pages_left)
    return filler


@pytest.mark.soak
@pytest.mark.parametrize("pages_left", [0, 3, 5])
def test_a_disk_that_is_full_from_the_start_is_told_in_one_line(
    tmp_path: Path, small_disk: Path, pages_left: int
) -> None:
    """Tokenizers, metrics and events are written by different libraries."""
    wanted = image_recipe(image_folder(tmp_path / "pictures"), small_disk / "run", run={"steps": 3})
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(wanted))
    fill(small_disk, pages_left)
    running = start(file)
    printed, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 1, printed
    assert "Traceback" not in printed
    assert "can't be written: No space left on device" in printed.splitlines()[-1]


@pytest.mark.parametrize("ranks", ["1", soak("2")])
def test_a_run_on_a_full_disk_fails_in_one_line_and_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path, ranks: str
) -> None:
    run = small_disk / "run"
    metrics = {"every": 1, "writers": ["tensorboard"]}
    checkpoint = {"every": 2, "asynchronous": True}
    wanted = text_recipe(
        text_file(tmp_path / "text.jsonl"), run, run={"steps": 100000}, metrics=metrics, checkpoint=checkpoint
    )
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(wanted))
    running = start(file, "--ranks", ranks)
    began = time.monotonic()
    while len(read_metrics(run)) < 4:
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.02)
    filler = fill(small_disk)
    printed, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 1, printed
    assert "Traceback" not in printed
    assert "No space left on device" in printed
    assert "start the run again: it goes on from the newest checkpoint" in printed
    filler.unlink()
    done = len(read_metrics(run))
    run_to_end(load_recipe(file, [f"run.steps={done + 2}"]), world=int(ranks))
    assert list(losses(run)) == list(range(done + 2))
    assert read_events(run)[-1]["kind"] == "finished"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_is_given_up(small_disk: Path) -> None:
    wanted = recipe(small_disk / "run", metrics={"writers": ["tensorboard"]})
    directory = RunDirectory(wanted.run.directory)
    directory.open(wanted)
    events: list[str] = []
    writers = MetricsWriters(wanted, directory, lambda kind, **fields: events.append(f"{kind}: {fields['message']}"))
    writers.training({"step": 0, "loss": 1.0})
    time.sleep(0.5)
    fill(small_disk)
    for writer in writers._writers:
        for step in range(2000):
            writer.call(lambda to, step=step: to.scalars(step, {"loss": 1.0}))
    writers.close()
    (event,) = events
    assert event.startswith("writer_given_up: tensorboard gets no more metrics (OSError: ")
    assert "No space left on device" in event
