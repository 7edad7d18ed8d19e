"""``headway train`` as a user and a scheduler meet it: real processes, real signals, exit codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.recipe import to_toml
from headway.train import read_metrics
from runs import events, losses
from tiny_recipes import text_file, text_recipe

DEADLINE_S = 120.0


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    text = text_file(tmp_path / "text.jsonl")
    run = text_recipe(text, tmp_path / "run", run={"steps": 1000}, metrics={"every": 1, "writers": []})
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(run))
    return file


def start(recipe: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "headway.cli.main", "train", str(recipe), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def processes_of(command: str) -> list[int]:
    """Ids of the running processes whose command line holds ``command``."""
    found = subprocess.run(["pgrep", "-f", command], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in found.split()]


def signal_at_step(
    process: subprocess.Popen[str], recipe: Path, step: int, number: signal.Signals, everywhere: bool = False
) -> tuple[int, str]:
    """Send ``number`` once ``step`` is in the metrics; the exit code and all that was printed."""
    began = time.monotonic()
    while not any(line["step"] >= step for line in read_metrics(recipe.parent / "run")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.02)
    for receiver in processes_of(f"train {recipe}") if everywhere else [process.pid]:
        os.kill(receiver, number)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, printed


def test_ranks_that_a_scheduler_stops_save_and_can_be_queued_again(recipe: Path) -> None:
    """SIGUSR1, sent to every process of the job, would kill torchrun. The same command goes on, then Ctrl-C."""
    code, printed = signal_at_step(start(recipe, "--ranks", "2"), recipe, 3, signal.SIGUSR1, everywhere=True)
    assert code == 75, printed
    assert "stopped by SIGUSR1" in printed
    saved = events(recipe.parent / "run", "stopped")[0]["step"]
    code, printed = signal_at_step(start(recipe, "--ranks", "2"), recipe, int(str(saved)) + 2, signal.SIGINT)
    assert code == 130, printed
    assert f"after step {saved}" in printed
    assert "Traceback" not in printed
    steps = list(losses(recipe.parent / "run"))
    assert steps == list(range(len(steps)))


def test_one_rank_stopped_by_sigterm_saves_and_exits_with_75(recipe: Path) -> None:
    code, printed = signal_at_step(start(recipe), recipe, 3, signal.SIGTERM)
    assert code == 75, printed
    assert len(list((recipe.parent / "run" / "checkpoints").iterdir())) == 1


def test_a_killed_rank_ends_the_run_with_a_clear_line(recipe: Path) -> None:
    process = start(recipe, "--ranks", "2")
    began = time.monotonic()
    while not read_metrics(recipe.parent / "run"):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    os.kill(processes_of(f"headway.cli.main train {recipe}")[-1], signal.SIGKILL)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, printed
    assert "was ended by SIGKILL" in printed


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("layout.dp_replicate=3", "layout.dp_replicate = 3 does not divide the 2 ranks; it can be 1, 2"),
        (
            "model.class_name=Qwen3ForCausalLN",
            "class_name = 'Qwen3ForCausalLN' is no model of diffusers or transformers: "
            "did you mean 'Qwen3ForCausalLM'?",
        ),
    ],
)
def test_a_mistake_is_told_once_whether_the_launcher_or_all_ranks_meet_it(recipe: Path, key: str, line: str) -> None:
    process = start(recipe, "--ranks", "2", "--set", key)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, printed
    assert printed.strip() == f"headway: error: {line}"
