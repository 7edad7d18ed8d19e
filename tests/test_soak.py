"""A hundred kills at random moments (``make soak``): whatever a run was doing, it goes on as if unbroken."""

import random
import time
from pathlib import Path

import pytest

from runs import RunningRun, losses, run_to_end
from test_run import assert_equal_state
from tiny_recipes import text_file, text_recipe

STEPS, KILLS = 40, 100


@pytest.mark.soak
def test_a_hundred_kills_change_no_loss_and_no_weight(tmp_path: Path) -> None:
    """Some kills hit a run on its way up, some its steps, its asynchronous saves or its end; 1 or 2 ranks in turn."""
    text = text_file(tmp_path / "text.jsonl")
    sections = {"run": {"steps": STEPS, "micro_batch": 4}, "checkpoint": {"every": 2, "asynchronous": True}}
    expected = {}
    for world in (1, 2):
        expected[world] = tmp_path / f"expected-{world}"
        run_to_end(text_recipe(text, expected[world], **sections), world)
    kills, runs = 0, 0
    while kills < KILLS:
        world = 1 + runs % 2
        recipe = text_recipe(text, tmp_path / f"run-{runs}", **sections)
        draw = random.Random(runs)
        while kills < KILLS:
            with RunningRun(recipe, world) as running:
                time.sleep(draw.uniform(0.3, 4.0))
                finished = not any(process.is_alive() for process in running.processes)
                running.kill()
            if finished:
                break
            kills += 1
        run_to_end(recipe, world)
        assert losses(recipe.run.directory) == losses(expected[world])
        assert_equal_state(recipe.run.directory, expected[world])
        runs += 1
        print(f"{kills} kills over {runs} runs", flush=True)
