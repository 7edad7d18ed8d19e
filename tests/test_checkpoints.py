import os
from pathlib import Path

import pytest
import torch

from checkpointed_run import Run
from headway.errors import UserError
from headway.recipe import CheckpointRecipe
from headway.train.checkpoint_manifest import (
    checkpoints_in,
)
from headway.train.checkpoint_reading import read_full, read_values
from headway.train.checkpoints import Checkpoints
from ranks import run_ranks
from shards import masters_of, shard


def saved_run(directory: Path, replicate: int) -> dict:
    run = Run(directory, replicate, steps=3)
    run.checkpoints.save(3, run.state(step=3, position=[1, 2], nested={"name": "ünïcode", "none": None}))
    assert run.checkpoints.finish()
    saved = run.whole()
    run.step(3)
    return {"saved": saved, "after": run.whole()}


def loaded_run(directory: Path, replicate: int) -> dict:
    run = Run(directory, replicate, seed=9)
    trainer = run.load(run.checkpoints.newest_good())
    loaded = run.whole()
    run.step(3)
    return {"loaded": loaded, "after": run.whole(), "trainer": trainer}


@pytest.mark.parametrize(
    ("saving", "loading"),
    [((2, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (3, 1)), ((1, 1), (2, 1)), ((2, 1), (4, 2)), ((4, 2), (3, 1))],
)
def test_a_checkpoint_goes_on_exactly_on_any_number_of_ranks(tmp_path, saving, loading):
    before = run_ranks(saving[0], saved_run, tmp_path, saving[1])[0]
    for after in run_ranks(loading[0], loaded_run, tmp_path, loading[1]):
        torch.testing.assert_close(after["loaded"], before["saved"], rtol=0, atol=0)
        torch.testing.assert_close(after["after"], before["after"], rtol=1e-6, atol=1e-6)
        assert after["trainer"] == {"step": 3, "position": [1, 2], "nested": {"name": "ünïcode", "none": None}}


def test_one_process_without_ranks_reads_whole_tensors_and_values(tmp_path):
    saved = run_ranks(3, saved_run, tmp_path, 1)[0]["saved"]
    path = tmp_path / "step-00000003"
    assert read_full(path, "model").keys() == saved["model"].keys()
    torch.testing.assert_close(read_full(path, "model"), saved["model"], rtol=0, atol=0)
    torch.testing.assert_close(read_full(path, "ema.0.999"), saved["ema"]["0.999"], rtol=0, atol=0)
    assert read_values(path)["trainer"]["step"] == 3
    with pytest.raises(UserError, match="it has ema, model, optimizer"):
        read_full(path, "ema.0.9")


def overwritten_while_saving(directory: Path) -> list:
    run = Run(directory, steps=1)
    for number in range(1, 4):  # the second and third save reuse the first one's buffers
        before = run.whole()
        run.checkpoints.save(number, run.state())
        for parameter in run.model.parameters():
            parameter.to_local().detach().fill_(float(number))
    run.checkpoints.finish()
    return [before["model"], run.kinds()]


def test_steps_taken_while_a_save_runs_do_not_reach_it(tmp_path):
    weights, kinds = run_ranks(2, overwritten_while_saving, tmp_path)[0]
    torch.testing.assert_close(read_full(tmp_path / "step-00000003", "model"), weights, rtol=0, atol=0)
    assert kinds == ["checkpoint_saved", "checkpoint_saved", "checkpoint_saved", "checkpoint_removed"]


def kept_steps(directory: Path, recipe: dict) -> list:
    run = Run(directory, **recipe)
    for step in range(10, 61, 10):
        run.checkpoints.save(step, run.state(), final=step == 60)
    return list(checkpoints_in(directory))


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [
        ({"keep_last": 1}, [60]),
        ({"keep_last": 2, "keep_every": 20}, [20, 40, 50, 60]),
        ({"keep_last": 3, "asynchronous": False}, [40, 50, 60]),
    ],
)
def test_the_newest_and_the_multiples_are_kept(tmp_path, recipe, kept):
    assert run_ranks(2, kept_steps, tmp_path, recipe) == [kept, kept]


def saved_twice(directory: Path) -> bool:
    run = Run(directory, steps=1)
    run.checkpoints.save(1, run.state(), final=True)
    run.step(1)
    run.checkpoints.save(1, run.state(), final=True)
    return torch.equal(read_full(directory / "step-00000001", "model")["0.weight"], run.whole()["model"]["0.weight"])


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    assert run_ranks(1, saved_twice, tmp_path) == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def refused_value(directory: Path) -> None:
    run = Run(directory)
    with pytest.raises(TypeError):
        run.checkpoints.save(1, run.state(path=Path("x")))
    with pytest.raises(TypeError):
        run.checkpoints.save(1, run.state(listed=[torch.zeros(1)]))


def test_a_value_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    run_ranks(1, refused_value, tmp_path)
    assert list(tmp_path.iterdir()) == []


def memory_over_saves(directory: Path) -> float:
    model = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700))
    model = shard(model)
    checkpoints = Checkpoints(directory, CheckpointRecipe(keep_last=1), lambda kind, fields: None)
    resident = []
    for step in range(30):
        checkpoints.save(step, {"model": masters_of(model).whole, "trainer": {"step": step}})
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    checkpoints.finish()
    return max(resident[20:]) - max(resident[3:10])


def test_host_memory_does_not_grow_over_thirty_saves(tmp_path):
    # One save's tensors are 3.7 MiB: leaking them would add 70 MiB and more.
    assert run_ranks(1, memory_over_saves, tmp_path)[0] < 12
