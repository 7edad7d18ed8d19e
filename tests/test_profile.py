"""``headway train --profile``: the right steps, whole traces that say what ran where, and a run none the worse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import run
from headway.explain import explain
from headway.recipe import Recipe, to_toml
from headway.runs import request_stop
from headway.timeline import Kind, Timeline, read_chrome_trace
from headway.train.profile import steps_to_profile
from headway.train.throughput import forget_peak_memory, peak_memory_gib
from runs import RunningRun, events, losses, run_to_end
from soak import soak
from tiny_recipes import image_folder, image_recipe, text_file, text_recipe

STEPS = 6


def recipe_of(folder: Path, name: str = "run", **sections: dict[str, Any]) -> Recipe:
    file = folder / "text.jsonl"
    run_section = {"steps": STEPS} | sections.pop("run", {})
    return text_recipe(file if file.exists() else text_file(file), folder / name, run=run_section, **sections)


def trace_of(recipe: Recipe, rank: int = 0) -> Timeline:
    trace = read_chrome_trace(recipe.run.directory / "traces" / f"rank_{rank}.json.gz")
    assert not trace.truncated
    assert not trace.mended
    return trace.timeline


def files(recipe: Recipe) -> list[str]:
    return sorted(file.name for file in (recipe.run.directory / "traces").glob("*"))


@pytest.mark.parametrize(
    ("session", "count", "expected"),
    [
        (range(0, 280), 3, range(10, 13)),
        (range(100, 280), 5, range(110, 115)),
        (range(0, 6), 3, range(3, 6)),
        (range(0, 4), 3, range(1, 4)),
        (range(7, 9), 3, range(8, 9)),
        (range(0, 1), 3, range(1, 1)),
    ],
)
def test_steps_are_profiled_after_the_warm_up_and_never_the_first(session, count, expected):
    assert steps_to_profile(session, count, lambda done: False) == expected


def test_steps_between_which_a_checkpoint_is_saved_are_passed_over():
    assert steps_to_profile(range(0, 280), 3, lambda done: done % 12 == 0) == range(13, 16)
    assert steps_to_profile(range(0, 280), 3, lambda done: True) == range(10, 13), "where all are, the first"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, str]:
    """Two ranks that accumulate gradients, with recomputation."""
    recipe = recipe_of(tmp_path_factory.mktemp("profiled"), memory={"activation_checkpointing": "full"})
    return recipe, run_to_end(recipe, world=2, profile_steps=2)


def test_each_rank_leaves_one_trace_of_whole_steps(profiled):
    recipe, printed = profiled
    assert files(recipe) == ["rank_0.json.gz", "rank_1.json.gz"]
    assert "steps 4 to 5 are profiled" in printed
    for rank in (0, 1):
        timeline = trace_of(recipe, rank)
        assert timeline.ranks() == [rank]
        device = timeline.kinds(Kind.COMPUTE, Kind.COMMUNICATION)
        assert set(timeline.step[device].tolist()) == {4, 5}
        assert set(timeline.select(timeline.kinds(Kind.COMMUNICATION)).text("axis")) == {"dp_shard"}


def test_what_computes_is_of_its_module_and_phase(profiled):
    """Of every linear layer: once forward, once recomputed and two products backward, in each micro-batch."""
    recipe, _ = profiled
    timeline = trace_of(recipe)
    computes = timeline.select(timeline.kinds(Kind.COMPUTE))
    counts: dict[tuple[str, str, str], int] = {}
    for key in zip(computes.text("module"), computes.text("phase"), computes.text("name"), strict=True):
        counts[key] = counts.get(key, 0) + 1
    micro_batches = recipe.run.global_batch // recipe.run.micro_batch // 2 * 2
    for layer in range(2):
        for projection in ("self_attn.q_proj", "mlp.down_proj"):
            module = f"model.layers.{layer}.{projection}"
            assert counts[module, "forward", "aten::linear"] == micro_batches
            assert counts[module, "recompute", "aten::linear"] == micro_batches
            assert counts[module, "backward", "aten::mm"] == 2 * micro_batches
    assert "optimizer" in {phase for _, phase, _ in counts}
    assert not [key for key in counts if key[0].startswith("model.layers") and key[1] == ""]


def test_a_collective_is_of_the_module_whose_parameters_it_gathers(profiled):
    timeline = trace_of(profiled[0])
    gathers = timeline.select(timeline.kinds(Kind.COMMUNICATION) & timeline.matching("collective", ["all_gather"]))
    assert {"model.layers.0", "model.layers.1"} <= set(gathers.text("module"))
    scatters = timeline.kinds(Kind.COMMUNICATION) & timeline.matching("collective", ["reduce_scatter"])
    assert {"model.layers.0", "model.layers.1"} <= set(timeline.select(scatters).text("module"))


def test_the_report_reads_the_traces_of_a_run_with_its_metrics(profiled):
    report = explain([profiled[0].run.directory])
    result = report.as_json()
    assert [one["kind"] for one in result["inputs"]] == ["run_directory", "kineto", "kineto"]
    assert report.verdict != "inconclusive"
    for rank in result["ranks"]:
        assert [step["step"] for step in rank["steps"]] == [4, 5]
        assert sum(rank["idle_by_cause_us"].values()) == pytest.approx(rank["idle_us"])
        assert rank["idle_by_cause_us"]["data_wait"] > 0
        assert rank["communication_us"] > 0


def test_a_profiled_run_computes_what_another_does(profiled, tmp_path):
    recipe = profiled[0]
    plain = recipe.model_copy(update={"run": recipe.run.model_copy(update={"directory": tmp_path / "run"})})
    run_to_end(plain, world=2)
    assert losses(plain.run.directory) == losses(recipe.run.directory)


def test_a_run_stopped_in_the_profile_leaves_no_trace_and_the_next_session_leaves_one(tmp_path):
    recipe = recipe_of(tmp_path, run={"steps": 400}, metrics={"every": 1, "writers": []})
    with RunningRun(recipe, world=2, profile_steps=380) as running:
        running.wait_for_step(14)
        request_stop(recipe.run.directory, "SIGTERM")
        running.wait()
    (recipe.run.directory / "stop-request").unlink()
    assert files(recipe) == []
    (stopped,) = events(recipe.run.directory, "stopped")
    assert len(events(recipe.run.directory, "profile_given_up")) == 1
    shorter = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": stopped["step"] + 3})})
    run_to_end(shorter, world=2, profile_steps=2)
    assert files(recipe) == ["rank_0.json.gz", "rank_1.json.gz"]
    assert set(trace_of(recipe).step.tolist()) >= {stopped["step"] + 1, stopped["step"] + 2}


def test_a_trace_that_cannot_be_written_stops_no_run(tmp_path):
    recipe = recipe_of(tmp_path)
    recipe.run.directory.mkdir()
    (recipe.run.directory / "traces").write_text("in the way")
    printed = run_to_end(recipe, profile_steps=2)
    assert "warning: " in printed
    assert "can't be written" in printed
    assert len(losses(recipe.run.directory)) == STEPS


@pytest.mark.parametrize(
    ("layout", "world"), [({"pp": 2}, 2), soak({"tp": 2}, 2), soak({"cp": 2}, 2), soak({"pp": 2, "dp_shard": 2}, 4)]
)
def test_every_layout_is_profiled(tmp_path, layout, world):
    recipe = recipe_of(tmp_path, layout=layout)
    run_to_end(recipe, world=world, profile_steps=2)
    report = explain([recipe.run.directory])
    assert [rank["rank"] for rank in report.explained.ranks] == list(range(world))
    assert all(rank["communication_us"] > 0 for rank in report.explained.ranks)
    modules = set().union(*(trace_of(recipe, rank).text("module") for rank in range(world)))
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"} <= modules
    if "pp" in layout:
        first = trace_of(recipe, 0)
        assert not any(
            module.startswith("model.layers.1") for module in first.select(first.kinds(Kind.COMPUTE)).text("module")
        )


@pytest.mark.soak
def test_a_compiled_block_is_not_compiled_anew_for_its_ranges(tmp_path):
    """Compiled before the profile; its range is there, and none of what is in it."""
    recipe = recipe_of(tmp_path, run={"steps": STEPS, "compile": True, "micro_batch": 8})
    run_to_end(recipe, profile_steps=2)
    timeline = trace_of(recipe)
    names = set(timeline.text("name"))
    assert "module: model.layers.1" in names
    assert not any(name.startswith("module: model.layers.1.") for name in names)
    regions = {name for name in names if name.startswith("Torch-Compiled Region")}
    assert regions == {"Torch-Compiled Region: 0/0"}, "one compilation for both blocks, and no second"
    computes = timeline.kinds(Kind.COMPUTE)
    backward = computes & timeline.matching("phase", ["backward"]) & timeline.matching("module", ["model.layers.1"])
    assert any("CompiledFxGraph" in name for name in timeline.select(backward).text("name"))


def test_what_the_profiler_held_is_no_longer_the_peak():
    device = torch.device("cpu")
    before = peak_memory_gib(device)
    held = np.ones(100_000_000)
    assert peak_memory_gib(device) > before + 0.6
    del held
    forget_peak_memory()
    assert peak_memory_gib(device) < before + 0.1


def test_the_command_ends_with_findings_and_a_page(monkeypatch, capsys, tmp_path):
    recipe = image_recipe(image_folder(tmp_path / "pictures"), tmp_path / "run", run={"steps": STEPS})
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe))
    code, out, err = run(monkeypatch, capsys, "train", str(file), "--profile", "--profile-steps", "2")
    assert (code, err) == (0, "")
    assert "1 run directory, 1 kineto" in out
    assert f"the whole report: {tmp_path / 'run' / 'report.html'}" in out
    assert "Frozen encoders" not in out, "they are trained"
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "rank_0.json.gz" in page
    spans = trace_of(recipe)
    assert np.any(spans.kinds(Kind.COMPUTE) & spans.matching("module", ["transformer.transformer_blocks.0.attn.to_q"]))
