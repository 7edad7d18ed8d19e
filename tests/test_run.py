"""Whole runs: what they leave behind, stopping, killing and resuming them."""

import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.recipe import Recipe
from headway.runs import read_metrics, request_stop
from headway.train import newest_good, read_full
from runs import RunningRun, events, losses, run_to_end
from soak import soak
from tiny_recipes import image_folder, image_recipe, text_file, text_recipe


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.jsonl")


STEPS = 14
"""More than two epochs of the text."""


def text_run(text: Path, directory: Path, **sections: dict[str, Any]) -> Recipe:
    run = {"micro_batch": 4, "steps": STEPS} | sections.pop("run", {})
    checkpoint = {"every": 3, "asynchronous": True} | sections.pop("checkpoint", {})
    return text_recipe(text, directory, run=run, checkpoint=checkpoint, **sections)


def image_run(pictures: Path, directory: Path, **sections: dict[str, Any]) -> Recipe:
    run = {"micro_batch": 4, "steps": STEPS} | sections.pop("run", {})
    return image_recipe(pictures, directory, run=run, **sections)


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken") / "run"
    run_to_end(text_run(text, directory))
    return directory


def final_state(directory: Path) -> dict[str, torch.Tensor]:
    newest = newest_good(directory / "checkpoints", lambda path, problems: None)
    assert newest is not None
    return {
        f"{section}.{name}": tensor
        for section in ("model", "optimizer", "ema")
        for name, tensor in read_full(newest, section).items()
    }


def assert_equal_state(found: Path, expected: Path) -> None:
    left, right = final_state(found), final_state(expected)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def stop_after(recipe: Recipe, step: int, world: int = 1) -> None:
    with RunningRun(recipe, world) as running:
        running.wait_for_step(step)
        request_stop(recipe.run.directory, "SIGTERM")
        running.wait()
    (recipe.run.directory / "stop-request").unlink()


@pytest.mark.parametrize("world", [soak(1), 2])
def test_a_run_stopped_twice_goes_on_as_if_never_stopped(text: Path, tmp_path: Path, world: int) -> None:
    """Shuffled data, stopped in the middle of an epoch, twice in a row."""
    expected = tmp_path / "expected"
    run_to_end(text_run(text, expected), world)
    recipe = text_run(text, tmp_path / "run")
    stop_after(recipe, 3, world)
    stop_after(recipe, 7, world)
    run_to_end(recipe, world)
    assert len(events(recipe.run.directory, "resumed")) == 2
    assert losses(recipe.run.directory) == losses(expected)
    assert_equal_state(recipe.run.directory, expected)


def test_a_run_on_pictures_resumes_exactly(pictures: Path, tmp_path: Path) -> None:
    expected = image_run(pictures, tmp_path / "expected", run={"steps": 8})
    run_to_end(expected)
    recipe = image_run(pictures, tmp_path / "run", run={"steps": 8})
    stop_after(recipe, 3)
    run_to_end(recipe)
    assert losses(recipe.run.directory) == losses(expected.run.directory)
    assert_equal_state(recipe.run.directory, expected.run.directory)


def test_a_run_goes_on_with_another_number_of_ranks(text: Path, tmp_path: Path, unbroken: Path) -> None:
    recipe = text_run(text, tmp_path / "run", run={"micro_batch": 2})
    stop_after(recipe, 2, world=2)
    stop_after(recipe, 5, world=4)
    run_to_end(recipe)
    assert [event["ranks"] for event in events(recipe.run.directory, "resumed")] == [4, 1]
    assert losses(recipe.run.directory) == pytest.approx(losses(unbroken), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_run_killed_at_a_random_moment_goes_on_as_if_unbroken(
    text: Path, tmp_path: Path, unbroken: Path, seed: int
) -> None:
    draw = random.Random(seed)
    recipe = text_run(text, tmp_path / "run", checkpoint={"every": 1})
    with RunningRun(recipe) as running:
        running.wait_for_step(draw.randrange(1, STEPS - 2))
        time.sleep(draw.random() * 0.1)
        running.kill()
    run_to_end(recipe)
    assert losses(recipe.run.directory) == losses(unbroken)
    assert_equal_state(recipe.run.directory, unbroken)


def test_a_damaged_checkpoint_is_passed_over_for_the_newest_good_one(
    text: Path, tmp_path: Path, unbroken: Path
) -> None:
    recipe = text_run(text, tmp_path / "run", checkpoint={"keep_last": 3})
    stop_after(recipe, 7)
    newest, older = sorted((recipe.run.directory / "checkpoints").iterdir())[::-1][:2]
    shard = next(newest.glob("*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    printed = run_to_end(recipe)
    assert f"checkpoint {newest.name} is damaged" in printed
    assert f"resumed from {older}" in printed
    assert losses(recipe.run.directory) == losses(unbroken)


def test_a_run_whose_last_checkpoint_cannot_be_saved_fails(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    recipe = text_run(text, tmp_path / "run", run={"steps": 2})
    with (
        RunningRun(recipe, world=2) as running,
        pytest.raises(AssertionError, match="the last checkpoint, after step 2, could not be saved"),
    ):
        running.wait()
    assert "10 are free" in str(events(recipe.run.directory, "checkpoint_failed")[0]["message"])
    assert events(recipe.run.directory, "finished") == []


def test_a_tokenizer_with_more_tokens_than_the_model_takes_is_refused(text: Path, tmp_path: Path) -> None:
    recipe = text_run(text, tmp_path / "run")
    model = recipe.model.model_copy(update={"config": recipe.model.config | {"vocab_size": 200}})
    with (
        RunningRun(recipe.model_copy(update={"model": model})) as running,
        pytest.raises(AssertionError, match=r"model\.tokenizer has 257 tokens and Qwen3ForCausalLM takes 200"),
    ):
        running.wait()


def test_metrics_validation_and_samples_of_a_run(pictures: Path, tmp_path: Path) -> None:
    recipe = image_run(
        pictures,
        tmp_path / "run",
        data={"hold_out": ["green circle"], "validation_fraction": 0.1},
        sample={"prompts": ["red square", "green circle", "blue square"], "steps": 3, "every": 7},
        metrics={"writers": ["tensorboard"], "validation_every": 7},
    )
    printed = run_to_end(recipe, world=2)
    lines = read_metrics(recipe.run.directory)
    training = [line for line in lines if "loss" in line]
    validation = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert list(validation) == [0, 7, 14]
    assert validation[14] < validation[0]
    assert [line["step"] for line in training] == list(range(STEPS))
    assert training[-1]["samples"] == 8 * STEPS
    assert training[-1]["tokens"] == 8 * STEPS * 16
    assert all(line["tflops_per_device"] > 0 and line["mfu"] is None for line in training)
    assert sorted(file.name for file in (recipe.run.directory / "samples").iterdir()) == [
        "step-00000007.png",
        "step-00000014.png",
    ]
    assert list((recipe.run.directory / "tensorboard").iterdir())
    assert "validation loss" in printed


def left_behind(directory: Path) -> dict[str, tuple[int, bytes]]:
    """What a run wrote, by file name, with the time of writing."""
    return {
        str(file.relative_to(directory)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("world", [1, soak(2)])
def test_a_complete_run_started_again_says_so_and_does_nothing(pictures: Path, tmp_path: Path, world: int) -> None:
    recipe = image_run(
        pictures,
        tmp_path / "run",
        run={"steps": 4},
        data={"validation_fraction": 0.1},
        sample={"prompts": ["red square"], "steps": 2},
        metrics={"writers": ["tensorboard"]},
    )
    run_to_end(recipe, world)
    before = left_behind(recipe.run.directory)
    printed = run_to_end(recipe, world)
    assert f"{recipe.run.directory} is complete after 4 steps: raise run.steps to go on" in printed
    assert left_behind(recipe.run.directory) == before
    run_to_end(image_run(pictures, tmp_path / "run", run={"steps": 5}, data={"validation_fraction": 0.1}), world)
    assert list(losses(recipe.run.directory)) == list(range(5))


def test_a_run_killed_after_its_last_checkpoint_comes_to_its_end_once(pictures: Path, tmp_path: Path) -> None:
    recipe = image_run(pictures, tmp_path / "run", run={"steps": 4}, data={"validation_fraction": 0.1})
    run_to_end(recipe)
    before = read_metrics(recipe.run.directory)
    lines = (recipe.run.directory / "events.jsonl").read_text().splitlines(keepends=True)
    assert '"finished"' in lines[-1]
    (recipe.run.directory / "events.jsonl").write_text("".join(lines[:-1]))
    run_to_end(recipe)
    assert read_metrics(recipe.run.directory) == before
    assert len(events(recipe.run.directory, "finished")) == 1
    assert len(events(recipe.run.directory, "checkpoint_saved")) == 1


def test_samples_that_cannot_be_saved_are_an_event_and_the_run_goes_on(pictures: Path, tmp_path: Path) -> None:
    recipe = image_run(pictures, tmp_path / "run", run={"steps": 4}, sample={"prompts": ["red square"], "steps": 2})
    with RunningRun(recipe) as running:
        running.wait_for_step(0)
        (recipe.run.directory / "samples").rmdir()
        (recipe.run.directory / "samples").write_text("in the way")
        running.wait()
    assert "the samples after 4 steps could not be saved" in str(events(recipe.run.directory, "samples_not_saved"))
    assert events(recipe.run.directory, "finished")


def test_prompts_for_a_model_that_draws_nothing_are_refused(text: Path, tmp_path: Path) -> None:
    with (
        RunningRun(text_run(text, tmp_path / "run", sample={"prompts": ["a fox"]})) as running,
        pytest.raises(AssertionError, match=r"UserError: sample\.prompts are drawn by diffusion models only"),
    ):
        running.wait()


def test_samples_do_not_depend_on_the_number_of_ranks(pictures: Path, tmp_path: Path) -> None:
    drawn = []
    for world in (1, 2):
        recipe = image_run(
            pictures,
            tmp_path / str(world),
            run={"steps": 2},
            sample={"prompts": ["red square", "blue circle", "green square"], "steps": 3},
        )
        run_to_end(recipe, world)
        drawn.append((recipe.run.directory / "samples" / "step-00000002.png").read_bytes())
    assert drawn[0] == drawn[1]


def test_corrupt_pictures_are_named_and_counted_and_end_the_run_past_the_limit(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pictures", count=16)
    (folder / "003.png").write_bytes((folder / "003.png").read_bytes()[:40])
    recipe = image_run(folder, tmp_path / "run", run={"steps": 4}, data={"max_bad_records": 2})
    run_to_end(recipe)
    named = [record for event in events(recipe.run.directory, "bad_records") for record in event["records"]]
    assert len(named) == 2
    assert all("003.png" in record for record in named)
    with RunningRun(image_run(folder, tmp_path / "strict", run={"steps": 4})) as running:
        with pytest.raises(AssertionError, match=r"1 corrupt records, more than data\.max_bad_records = 0"):
            running.wait()
    failed_in = events(tmp_path / "strict", "bad_records")[0]["step"]
    assert list(losses(tmp_path / "strict"))[-1] == failed_in, "the step that ends the run is written down"
