"""``headway train --cluster``: a run keeps its prediction, and ends with it beside what was measured."""

import json
from pathlib import Path

import pytest

from commands import run
from headway.cluster import cluster_toml, load_cluster
from headway.errors import UserError
from headway.explain import explain
from headway.recipe import to_toml
from headway.runs import compare, measured, read_events
from test_calibrate_from_run import CPU, cpu
from tiny_recipes import text_file, text_recipe


@pytest.fixture
def recipe(tmp_path) -> Path:
    own = text_recipe(
        text_file(tmp_path / "text.jsonl"), tmp_path / "run", run={"steps": 6}, metrics={"every": 1, "writers": []}
    )
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(own))
    (tmp_path / "here.toml").write_text(cluster_toml(cpu()))
    return file


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in read_events(folder)]


def test_a_run_keeps_its_prediction_and_ends_with_both(monkeypatch, capsys, recipe, tmp_path):
    directory = tmp_path / "run"
    here = str(tmp_path / "here.toml")
    code, out, err = run(monkeypatch, capsys, "train", str(recipe), "--cluster", here, "--profile")
    assert (code, err) == (0, "")
    assert kinds(directory)[:2] == ["started", "predicted"], "before the first step"
    found = json.loads((directory / "prediction.json").read_text())
    assert found["devices"] == 1
    time = found["prediction"]["step_time_s"]
    assert 0 < time["low"] <= time["value"] <= time["high"]
    assert load_cluster(directory / "cluster.toml").accelerator.name == "toy"
    comparison = compare(directory, "sequences")
    assert [row.name for row in comparison.rows] == [
        "step time", "peak memory", "sequences/s", "tokens/s", "TFLOP/s a device", "MFU"
    ]  # fmt: skip
    assert comparison.rows[0].measured == measured(directory).step_time_s
    table = out[out.index("Predicted on") :]
    assert f"{time['value']:.4g} s" in table
    assert "in range" in table
    (planned,) = explain([directory]).as_json()["planned"]
    assert planned["planned_us"] == pytest.approx(1e6 * time["value"])
    assert {"forward", "backward"} <= {cause["cause"] for cause in planned["causes"]}
    blocks = {block for cause in planned["causes"] if cause["cause"] == "backward" for block in cause["blocks_us"]}
    assert {"model.layers.0", "model.layers.1", "model.embed_tokens"} <= blocks
    assert planned["text"].partition(":")[0] in table


@pytest.mark.soak
def test_what_cannot_be_predicted_is_trained(monkeypatch, capsys, recipe, tmp_path):
    """A cluster that knows no rate of bfloat16, in a run that goes on from one with a prediction."""
    directory, here = tmp_path / "run", tmp_path / "here.toml"
    assert run(monkeypatch, capsys, "train", str(recipe), "--cluster", str(here), "--set", "run.steps=3")[0] == 0
    accelerator = "".join(f"{key} = {json.dumps(value)}\n" for key, value in CPU.items() if key != "dense_peak_tflops")
    here.write_text(f"[accelerator]\n{accelerator}dense_peak_tflops = {{ float32 = 0.05 }}\n")
    code, out, err = run(
        monkeypatch, capsys, "train", str(recipe), "--cluster", str(here), "--set", "precision.compute=bfloat16"
    )
    assert (code, err) == (0, "")
    assert "warning: there is no prediction of this run: " in out
    assert kinds(directory).count("prediction_failed") == 1
    assert not (directory / "prediction.json").exists()
    assert "Predicted on" not in out


def test_a_mistake_in_the_cluster_is_told_before_anything_starts(monkeypatch, capsys, recipe, tmp_path):
    code, out, err = run(monkeypatch, capsys, "train", str(recipe), "--cluster", "dgx-h10")
    assert (code, out) == (2, "")
    assert "cluster 'dgx-h10' is not known; did you mean dgx-h100?" in err
    assert not (tmp_path / "run").exists()


def write_run(folder: Path, events: list[dict[str, object]], lines: list[dict[str, object]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(numbers: range, seconds: float, every: int = 1) -> list[dict[str, object]]:
    return [
        {"step": n + every - 1, "step_time_s": seconds, "data_wait_s": 0.0, "samples_per_s": 4 / seconds,
         "peak_memory_gib": 1.0}
        for n in numbers[::every]
    ]  # fmt: skip


PREDICTION = {
    "cluster": "toy", "devices": 2, "peak_tflops": None,
    "prediction": {"step_time_s": {"value": 1.0, "low": 0.8, "high": 1.25}, "samples_per_s_per_device": 2.0,
                   "tokens_per_s_per_device": 0.0, "tflops_per_device": 1.0, "mfu": None},
    "first_rank_peak_memory_gib": {"value": 2.0, "low": 1.5, "high": 2.5},
}  # fmt: skip


def test_what_is_measured_is_the_last_session_after_its_warm_up(tmp_path):
    events = [{"kind": "started", "step": 0, "ranks": 4}, {"kind": "resumed", "step": 20, "ranks": 2}]
    lines = steps(range(20), 9.0) + steps(range(20, 30), 5.0) + steps(range(30, 60, 1), 1.0)
    write_run(tmp_path / "run", events, lines)
    found = measured(tmp_path / "run")
    assert (found.ranks, found.lines, found.step_time_s, found.low_s, found.high_s) == (2, 30, 1.0, 1.0, 1.0)
    write_run(tmp_path / "run", events[:1], steps(range(40), 2.0, every=10))
    assert measured(tmp_path / "run").lines == 3, "the first line has the steps of the warm-up"
    write_run(tmp_path / "run", events, steps(range(20), 9.0))
    assert measured(tmp_path / "run") is None, "nothing of the last session"
    write_run(tmp_path / "run", [], lines)
    assert measured(tmp_path / "run") is None


def test_profiled_steps_are_not_measured_where_there_are_others(tmp_path):
    events = [{"kind": "started", "step": 0, "ranks": 2}, {"kind": "profiled", "step": 22, "steps": [20, 22]}]
    lines = steps(range(20), 1.0) + steps(range(20, 23), 3.0) + steps(range(23, 40), 1.0)
    write_run(tmp_path / "run", events, lines)
    assert measured(tmp_path / "run").lines == 27
    write_run(tmp_path / "run", events, steps(range(100), 1.0, every=25))
    assert measured(tmp_path / "run").lines == 3, "the first line has the warm-up and the profile"
    write_run(tmp_path / "run", [*events[:1], {**events[1], "steps": [0, 60]}], steps(range(40), 2.0, every=10))
    assert measured(tmp_path / "run").lines == 3, "all were profiled"


def test_only_the_prediction_of_the_last_session_counts(tmp_path):
    run, started = tmp_path / "run", {"kind": "started", "step": 0, "ranks": 2}
    write_run(run, [started, {"kind": "predicted", "step": 0}], steps(range(30), 1.1))
    (run / "prediction.json").write_text(json.dumps(PREDICTION))
    rows = {row.name: row for row in compare(run, "images").rows}
    assert list(rows) == ["step time", "peak memory", "images/s"]
    assert (rows["step time"].measured, rows["step time"].within) == (1.1, True)
    assert rows["step time"].error == pytest.approx(1 / 1.1 - 1)
    assert (rows["peak memory"].measured, rows["peak memory"].within) == (1.0, False)
    assert (rows["images/s"].predicted, rows["images/s"].low, rows["images/s"].high) == pytest.approx((4, 3.2, 5))
    write_run(run, [started, {"kind": "predicted", "step": 0}, {"kind": "resumed", "step": 30, "ranks": 2}],
              steps(range(60), 1.1))  # fmt: skip
    assert compare(run, "images") is None


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_prediction_is_told(tmp_path, text):
    run = tmp_path / "run"
    write_run(
        run, [{"kind": "started", "step": 0, "ranks": 2}, {"kind": "predicted", "step": 0}], steps(range(30), 1.0)
    )
    (run / "prediction.json").write_text(text)
    with pytest.raises(UserError, match=r"prediction\.json .*: delete it"):
        compare(run, "images")
