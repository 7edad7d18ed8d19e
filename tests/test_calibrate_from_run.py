"""A cluster brought in line with a run: what it blames, by how much, and what it refuses.

The runs here are written by hand with the times that the true cluster predicts, so that what is found can be compared
with what is true.
"""

import json
import tomllib
from functools import cache
from pathlib import Path

import pytest

from commands import recipe_file, run
from headway.calibrate import calibrate_from
from headway.cluster import Cluster, cluster_named, cluster_toml, parse_cluster
from headway.errors import UserError
from headway.recipe import Recipe, parse_recipe, to_toml
from headway.rehearse import Record, predict, rehearse, roles
from rehearsed_recipes import text

CPU = {
    "name": "toy",
    "vendor": "unknown",
    "form": "CPU",
    "generation": "unknown",
    "processors": 1,
    "dense_peak_tflops": {"float32": 0.05, "bfloat16": 0.02},
    "memory_gb": 8,
    "memory_bandwidth_gb_per_s": 8,
    "scale_up_devices": 2,
}
ACHIEVED = {
    "matrix": {"float32": {"efficiency": [0.9, 0.8, 1.0], "half_depth": 20}},
    "memory": {"startup_us": 0.0},
    "host": {"operator_us": [20.0, 15.0, 25.0], "process_gib": [0.5, 0.45, 0.55]},
}


def cpu(gb_per_s: float = 1.0, ranks: int = 2) -> Cluster:
    """Two ranks of a slow processor, joined by ``gb_per_s``."""
    level = {"name": "link", "devices": ranks, "gb_per_s_unidirectional": gb_per_s}
    document = {"accelerator": CPU, "devices_per_node": ranks, "levels": [level], "achieved": ACHIEVED}
    return parse_cluster(document, "test")


def slower(cluster: Cluster, factor: float, *, device: bool = True, link: bool = False) -> Cluster:
    """``cluster`` with all its rates times ``factor``, by the keys of its file."""
    document = cluster.model_dump(mode="json", exclude_none=True)
    achieved = document["achieved"]
    rates = [achieved["memory"]["fraction"], *(kernel[way] for kernel in achieved["attention"].values()
             for way in ("forward", "backward"))] if device else []  # fmt: skip
    rates += achieved["matrix"].values() if device else []
    rates += [level["achieved"] for level in document["levels"]] if link else []
    for table in rates:
        for key, rate in table.items():
            if isinstance(rate, dict) and set(rate) == {"value", "low", "high"}:
                table[key] = {end: number * factor for end, number in rate.items()}
    if device:
        host = achieved["host"]["operator_us"]
        achieved["host"]["operator_us"] = {end: number / factor for end, number in host.items()}
    return parse_cluster(document | {"units_checked": True}, "test")


@cache
def records(toml: str, ranks: int) -> list[Record]:
    recipe = parse_recipe(tomllib.loads(toml), "test")
    return [rehearse(recipe, ranks, role.rank) for role in roles(recipe, ranks)]


def step_s(recipe: Recipe, cluster: Cluster, ranks: int = 2) -> float:
    return predict(records(to_toml(recipe), ranks), cluster).step_time_s.value


def written_run(folder: Path, recipe: Recipe, seconds: float, ranks: int = 2, memory: float = 0.9) -> Path:
    """A run of ``recipe`` whose steps took ``seconds``, give or take a percent; the first ones longer."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(recipe))
    (folder / "events.jsonl").write_text(json.dumps({"kind": "started", "step": 0, "ranks": ranks}) + "\n")
    lines = []
    for step in range(40):
        longer = 3.0 if step < 5 else 1 + 0.01 * (step % 3 - 1)
        known = {"step": step, "step_time_s": seconds * longer + 0.2, "data_wait_s": 0.2, "peak_memory_gib": memory}
        lines.append(json.dumps(known | {"samples_per_s": 1.0, "tokens_per_s": 10.0}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return text(run={"global_batch": 8, "micro_batch": 4})


def test_a_cluster_of_half_the_rates_comes_out_right_after_one_run(tmp_path, recipe):
    true = cpu()
    run = written_run(tmp_path / "run", recipe, step_s(recipe, true))
    found = calibrate_from(run, slower(true, 0.5))
    assert found.part == "device"
    assert found.predicted_s.low > found.measured.step_time_s, "that the rates are wrong is not within the old range"
    assert found.factor == pytest.approx(2.0, rel=0.03)
    assert found.corrected_s.value == pytest.approx(found.measured.step_time_s, rel=0.01)
    rate, truth = (one.achieved.matrix["float32"].efficiency for one in (found.cluster, true))
    assert rate.value == pytest.approx(truth.value, rel=0.03)
    assert rate.low < truth.low
    assert rate.high > truth.high, "what one run can't tell makes the range wider"
    assert found.cluster.achieved.host.operator_us.value == pytest.approx(20, rel=0.03)
    assert str(run) in found.cluster.source
    assert found.cluster.levels == slower(true, 0.5).levels
    other = text(run={"global_batch": 2, "micro_batch": 1}, data={"sequence_length": 64})
    assert step_s(other, found.cluster) == pytest.approx(step_s(other, true), rel=0.03)


def test_what_is_slow_because_of_the_link_does_not_change_the_device(tmp_path, recipe):
    true = cpu(gb_per_s=0.002)
    run = written_run(tmp_path / "run", recipe, step_s(recipe, true))
    wrong = slower(true, 0.5, device=False, link=True)
    found = calibrate_from(run, wrong)
    assert found.part == "link"
    assert found.factor == pytest.approx(2.0, rel=0.05)
    assert found.cluster.achieved.matrix == true.achieved.matrix


def test_the_memory_of_a_process_is_learned_on_a_cpu(tmp_path, recipe):
    run = written_run(tmp_path / "run", recipe, step_s(recipe, cpu()), memory=0.9)
    found = calibrate_from(run, cpu())
    assert found.process_gib == pytest.approx(0.9, abs=0.01), "the toy's tensors are next to nothing"
    assert found.cluster.achieved.host.process_gib.value == found.process_gib


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (32, "no rate of the host, which most of it hangs on, explains that"),
        (8192, "was faster than H100-SXM5-80GB can be: its .* products would reach"),
    ],
)
def test_a_run_that_a_device_cannot_have_made_is_refused(tmp_path, length, message):
    sections = {"run": {"global_batch": 2, "micro_batch": 2}, "precision": {"compute": "bfloat16"}}
    heavy = text(**sections, data={"sequence_length": length})
    wide = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_key_value_heads": 32}
    model = heavy.model.model_copy(update={"config": heavy.model.config | wide | {"head_dim": 128}})
    heavy = heavy.model_copy(update={"model": model})
    hopper = cluster_named("dgx-h100")
    with pytest.raises(UserError, match=message):
        calibrate_from(written_run(tmp_path / "run", heavy, step_s(heavy, hopper, 1) / 8, ranks=1), hopper)


@pytest.mark.parametrize("what", ["nothing", "no steps"])
def test_what_is_no_run_is_told(tmp_path, recipe, what):
    run = tmp_path / "run"
    if what == "no steps":
        written_run(run, recipe, 1.0)
        (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no run directory whose metrics"):
        calibrate_from(run, cpu())


def test_a_plan_stands_on_what_a_run_taught_and_writes_it(monkeypatch, capsys, tmp_path, recipe):
    here = written_run(tmp_path / "run-of-before", recipe, 3 * step_s(recipe, cpu()))
    file = recipe_file(tmp_path)
    (tmp_path / "here.toml").write_text(cluster_toml(cpu()))
    arguments = ["--devices", "2", "--top", "1", "--precision", "float32", "--calibrate-from", str(here)]
    code, out, err = run(monkeypatch, capsys, "plan", file, "--cluster", str(tmp_path / "here.toml"), *arguments)
    assert (code, err) == (0, "")
    assert "its rates are taken × 0.3" in out
    assert f"written: {here / 'calibrated.toml'}" in out
    code, _, err = run(monkeypatch, capsys, "plan", file, *arguments)
    assert code == 2
    assert "was not trained with --cluster: give --cluster" in err
    code, _, err = run(monkeypatch, capsys, "plan", file, "--devices", "2")
    assert (code, err) == (2, "headway: error: give --cluster NAME|FILE\n")
