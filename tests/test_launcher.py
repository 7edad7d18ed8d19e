"""``headway train`` as a user and a scheduler meet it: real processes, real signals, exit codes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.recipe import load_recipe, to_toml
from headway.runs import read_metrics
from runs import events, losses, run_to_end
from soak import soak
from tiny_recipes import text_file, text_recipe

DEADLINE_S = 120.0


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Path]:
    text = text_file(tmp_path / "text.jsonl")
    run = text_recipe(text, tmp_path / "run", run={"steps": 1000}, metrics={"every": 1, "writers": []})
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(run))
    yield file
    end_what_is_left(file)


HEADWAY = (sys.executable, "-m", "headway.cli.main")


def start(recipe: Path, *arguments: str, command: tuple[str, ...] = HEADWAY, **extra: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "train", str(recipe), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | extra,
        start_new_session=True,
    )


def processes_of(command: str) -> list[int]:
    """Ids of the running processes whose command line holds ``command``."""
    found = subprocess.run(["pgrep", "-f", command], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]


def end_what_is_left(recipe: Path) -> None:
    """A test that has failed leaves no run behind."""
    for process in processes_of(f"train {recipe}"):
        os.kill(process, signal.SIGKILL)


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


@pytest.mark.parametrize("number", [soak(signal.SIGTERM), signal.SIGUSR1, soak(signal.SIGINT)])
def test_a_signal_to_every_process_of_a_job_ends_its_step_and_saves(recipe: Path, number: signal.Signals) -> None:
    """As SLURM sends it: to the launcher, torchrun, the ranks and their data workers. Then the same command goes on."""
    running = start(recipe, "--ranks", "2", "--set", "data.workers=2")
    code, printed = signal_at_step(running, recipe, 3, number, everywhere=True)
    assert code == (130 if number == signal.SIGINT else 75), printed
    assert f"stopped by {number.name}" in printed
    assert "Traceback" not in printed
    (stopped,) = events(recipe.parent / "run", "stopped")
    assert [path.name for path in (recipe.parent / "run" / "checkpoints").iterdir()] == [f"step-{stopped['step']:08d}"]
    done = int(str(stopped["step"]))
    (recipe.parent / "run" / "stop-request").unlink(missing_ok=True)
    assert f"after step {done}" in run_to_end(load_recipe(recipe, [f"run.steps={done + 2}"]), world=2)
    assert list(losses(recipe.parent / "run")) == list(range(done + 2))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_rank_and_its_workers_stopped_by_a_signal_save(recipe: Path, number: signal.Signals) -> None:
    running = start(recipe, "--set", "data.workers=2")
    code, printed = signal_at_step(running, recipe, 3, number, everywhere=True)
    assert code == (130 if number == signal.SIGINT else 75), printed
    assert len(list((recipe.parent / "run" / "checkpoints").iterdir())) == 1


def test_a_signal_that_comes_while_the_ranks_start_is_not_lost(recipe: Path) -> None:
    running = start(recipe, "--ranks", "2")
    began = time.monotonic()
    while len(processes_of(f"headway.cli.main train {recipe}")) < 3:
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.02)
    for receiver in processes_of(f"train {recipe}"):
        os.kill(receiver, signal.SIGTERM)
    printed, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 75, printed
    assert events(recipe.parent / "run", "stopped")[0]["step"] == 1


@pytest.mark.soak
def test_a_second_ctrl_c_ends_the_ranks_at_once(recipe: Path) -> None:
    running = start(recipe, "--ranks", "2", "--set", "run.steps=100000")
    began = time.monotonic()
    while not read_metrics(recipe.parent / "run"):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.02)
    ranks = [pid for pid in processes_of(f"headway.cli.main train {recipe}") if pid != running.pid]
    os.kill(ranks[0], signal.SIGSTOP)  # the step will never end
    for _ in range(2):
        os.kill(running.pid, signal.SIGINT)
        time.sleep(0.3)
    os.kill(ranks[0], signal.SIGCONT)
    printed, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 130, printed
    assert processes_of(f"train {recipe}") == []


@pytest.mark.parametrize("ranks", [1, soak(2)])
def test_ranks_that_a_scheduler_started_itself_exit_with_75(recipe: Path, ranks: int) -> None:
    """One task a rank, as under srun; without torchrun the exit code reaches the scheduler."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    address = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first, *others = (start(recipe, RANK=str(rank), **address) for rank in range(ranks))
    code, printed = signal_at_step(first, recipe, 3, signal.SIGTERM, everywhere=True)
    assert code == 75, printed
    for other in others:
        assert other.wait(DEADLINE_S) == 75, other.communicate()[0]


@pytest.mark.soak
def test_a_stopped_rank_of_torchrun_ends_well_as_torchrun_would_call_all_else_a_failure(recipe: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    running = start(recipe, command=(*torchrun, "headway.cli.main"))
    ranks = []
    while len(ranks) < 2:
        ranks = processes_of(f"^{sys.executable} -u -m headway.cli.main train {recipe}")
        time.sleep(0.05)
    began = time.monotonic()
    while not read_metrics(recipe.parent / "run"):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.02)
    os.kill(ranks[0], signal.SIGTERM)
    printed, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 0, printed
    assert events(recipe.parent / "run", "stopped")


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
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("key", "line"),
    [
        soak("layout.dp_replicate=3", "layout.dp_replicate = 3 does not divide the 2 ranks; it can be 1, 2"),
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
