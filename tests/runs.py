"""Whole runs in forked processes that tests may stop and kill."""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from headway.parallel import Ranks
from headway.recipe import Recipe
from headway.runs import read_metrics
from headway.train import run_recipe
from ranks import fork

DEADLINE_S = 150.0


class RunningRun:
    """``recipe`` on ``world`` gloo ranks, each a process of its own. A context manager: it leaves no process behind."""

    def __init__(self, recipe: Recipe, world: int = 1, profile_steps: int = 0) -> None:
        self.recipe = recipe
        self.directory = recipe.run.directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.output = Path(tempfile.mkdtemp())
        self.processes = [
            fork.Process(target=_rank_main, args=(recipe, rank, world, self.output, profile_steps), daemon=False)
            for rank in range(world)
        ]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for process in self.processes:
            process.kill()
            process.join()

    def wait(self) -> None:
        """Wait for a good end of all ranks; AssertionError with what they printed otherwise."""
        for process in self.processes:
            process.join(DEADLINE_S)
        codes = [process.exitcode for process in self.processes]
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.printed()}"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``; AssertionError when the run ends or the deadline passes before."""
        began = time.monotonic()
        while not condition():
            alive = all(process.is_alive() for process in self.processes)
            assert alive, self.printed()
            assert time.monotonic() - began < DEADLINE_S, self.printed()
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is in the metrics."""
        self.wait_until(lambda: any(line["step"] >= step for line in read_metrics(self.directory)))

    def printed(self) -> str:
        """What all ranks printed."""
        return "\n".join(file.read_text() for file in sorted(self.output.glob("rank-*")))


def run_to_end(recipe: Recipe, world: int = 1, profile_steps: int = 0) -> str:
    """Run ``recipe`` and return what its ranks printed."""
    with RunningRun(recipe, world, profile_steps) as running:
        running.wait()
        return running.printed()


def losses(directory: Path) -> dict[int, float]:
    """Step -> loss of a run; AssertionError when a step stands there twice."""
    lines = [line for line in read_metrics(directory) if "loss" in line]
    steps = [line["step"] for line in lines]
    assert len(set(steps)) == len(steps), f"steps written twice: {steps}"
    return {line["step"]: line["loss"] for line in lines}


def events(directory: Path, kind: str) -> list[dict[str, object]]:
    """The run's events of a kind."""
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def _rank_main(recipe: Recipe, rank: int, world: int, output: Path, profile_steps: int) -> None:
    code = 0
    with ExitStack() as stack:
        printed = stack.enter_context((output / f"rank-{rank}").open("w", buffering=1, encoding="utf-8"))
        sys.stdout = sys.stderr = printed
        try:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = dist.FileStore(str(output / "store"), world)
            timeout = timedelta(seconds=DEADLINE_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
            run_recipe(recipe, Ranks(rank, world, torch.device("cpu")), profile_steps=profile_steps)
            dist.destroy_process_group()
        except BaseException:
            traceback.print_exc()
            code = 1
    os._exit(code)
