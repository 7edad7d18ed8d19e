"""``headway rehearse``: its result, its files, and what it says to a mistake."""

import json
from pathlib import Path

import pytest

from commands import recipe_file, run
from headway.timeline import DEVICE_KINDS, breakdown, read_chrome_trace


@pytest.fixture
def recipe(tmp_path) -> str:
    return recipe_file(tmp_path)


def test_a_pipeline_of_shards_is_predicted_with_ranges_trace_and_page(monkeypatch, capsys, recipe, tmp_path):
    code, out, err = run(
        monkeypatch, capsys, "rehearse", recipe, "--cluster", "dgx-h100", "--devices", "4", "--set", "layout.pp=2",
        "--trace", str(tmp_path / "step.json"), "--html", str(tmp_path / "step.html"), "--json", "-",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(out)
    predicted = result["prediction"]
    for name in ("step_time_s", "peak_memory_gib"):
        assert 0 < predicted[name]["low"] < predicted[name]["value"] < predicted[name]["high"]
    parts = dict(result["breakdown"])
    exposed = parts.pop("exposed_communication_s")
    assert sum(parts.values()) + sum(exposed.values()) == pytest.approx(predicted["step_time_s"]["value"])
    assert {"pp", "dp_shard"} <= set(exposed)
    assert parts["bubble_s"] > 0
    assert predicted["oom_probability"] < 1e-6
    assert predicted["tokens_per_s_per_device"] == pytest.approx(48 * 2 * predicted["samples_per_s_per_device"] / 2)
    held = result["memory"]["held_by"]
    assert sum(held.values()) == pytest.approx(result["memory"]["peak_gib"])
    assert result["operators"][0]["share"] >= result["operators"][-1]["share"]
    assert {row["collective"] for row in result["collectives"]} >= {"all_gather", "reduce_scatter", "send", "recv"}
    trace = read_chrome_trace(tmp_path / "step.json").timeline
    assert trace.ranks() == result["simulated_ranks"] == [0, 2]
    first = trace.of_rank(0)
    assert breakdown(first).window_ns <= predicted["step_time_s"]["value"] * 1e9
    assert set(first.select(first.kinds(*DEVICE_KINDS)).text("phase")) >= {"forward", "backward", "optimizer"}
    assert "Qwen3ForCausalLM" in (tmp_path / "step.html").read_text()


def test_a_person_reads_time_memory_and_where_they_go(monkeypatch, capsys, recipe):
    code, out, _ = run(monkeypatch, capsys, "rehearse", recipe, "--cluster", "A100-SXM4-80GB", "--devices", "2")
    assert code == 0
    for told in ("step time", "peak memory", "out of memory", "where the time goes", "communication dp_shard", "host"):
        assert told in out
    assert "all_gather" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cluster dgx-h10 --devices 2", "cluster 'dgx-h10' is not known; did you mean dgx-h100?"),
        ("--cluster {}/no.toml --devices 2", "no.toml: cannot be read"),
        ("--cluster dgx-h100 --devices 3 --set layout.tp=2", "does not divide the 3 ranks"),
        ("--cluster dgx-h100 --devices 2 --html {}/no/page.html", "--html {}/no/page.html can't be written"),
        ("--cluster dgx-h100 --devices 2 --trace {}", "--trace {} can't be written"),
        ("--cluster {}/small.toml --devices 16", "joins 8 devices and 16 are asked for"),
        ("--cluster dgx-h100 --devices 2 --set model.class_name=Qwen4", "class_name = 'Qwen4' is no model"),
    ],
)
def test_a_mistake_is_told_in_one_line(monkeypatch, capsys, recipe, tmp_path, arguments, message):
    (tmp_path / "small.toml").write_text('accelerator = "H100-SXM5-80GB"\ndevices = 8\n')
    given = arguments.replace("{}", str(tmp_path)).split()
    given += ["--set", "run.global_batch=32"] if "16" in given else []
    code, out, err = run(monkeypatch, capsys, "rehearse", recipe, *given)
    assert (code, out) == (2, "")
    assert message.replace("{}", str(tmp_path)) in err
    assert len(err.splitlines()) == 1
    assert Path(recipe).exists()
