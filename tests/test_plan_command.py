"""``headway plan``: what it writes and prints, and what it says to a mistake."""

import json

import pytest

from commands import recipe_file, run
from headway.recipe import load_recipe, sizes


@pytest.fixture
def recipe(tmp_path) -> str:
    return recipe_file(tmp_path)


def test_a_plan_is_told_written_and_drawn(monkeypatch, capsys, recipe, tmp_path):
    written, page, result = tmp_path / "planned.toml", tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = ["--cluster", "dgx-h100", "--devices", "2", "--top", "2", "--precision", "bfloat16", "--explain"]
    outputs = ["--to", str(written), "--html", str(page), "--json", str(result)]
    code, out, err = run(monkeypatch, capsys, "plan", recipe, *arguments, *outputs)
    assert (code, out, err) == (0, "", "")
    found = json.loads(result.read_text())
    first = found["plans"][0]
    read = load_recipe(tmp_path / "recipe.toml", first["overrides"])
    assert load_recipe(written) == read
    axes = sizes(read.layout, 2)
    assert {name: first["layout"][name] for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")} == {
        name: getattr(axes, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    }
    assert found["explanation"].startswith("[1] ")
    assert found["evaluated"] > 50
    assert "Qwen3ForCausalLM on 2" in page.read_text()


def test_a_person_reads_plans_reasons_and_overrides(monkeypatch, capsys, recipe):
    arguments = ["--cluster", "A100-SXM4-80GB", "--devices", "1", "--top", "1", "--price-per-device-hour", "2.5"]
    code, out, _ = run(monkeypatch, capsys, "plan", recipe, *arguments)
    assert code == 0
    for told in ("plans, best first", "cost of a step", "the first as overrides:", "--set run.micro_batch="):
        assert told in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cluster dgx-h10 --devices 2", "cluster 'dgx-h10' is not known; did you mean dgx-h100?"),
        ("--cluster dgx-h100 --devices two", "--devices two: give a number"),
        ("--cluster dgx-h100 --devices 0", "--devices 0: give numbers from 1 up"),
        ("--cluster dgx-h100", "does not say how many devices there are: give --devices N"),
        ("--cluster {}/small.toml --devices 16", "joins 8 devices and 16 are asked for"),
        ("--cluster dgx-h100 --devices 2 --price-per-device-hour -1", "give a price above 0"),
        ("--cluster dgx-h100 --devices 2 --html {}/no/page.html", "--html {}/no/page.html can't be written"),
        ("--cluster dgx-h100 --devices 2 --set model.class_name=Qwen4", "class_name = 'Qwen4' is no model"),
        ("--cluster dgx-h100 --devices 2 --set layout.pp_cuts=[1,1]", "layout.pp_cuts fixes the stages"),
    ],
)
def test_a_mistake_is_told_in_one_line(monkeypatch, capsys, recipe, tmp_path, arguments, message):
    (tmp_path / "small.toml").write_text('accelerator = "H100-SXM5-80GB"\ndevices = 8\n')
    given = arguments.replace("{}", str(tmp_path)).split()
    code, out, err = run(monkeypatch, capsys, "plan", recipe, *given)
    assert (code, out) == (2, "")
    assert message.replace("{}", str(tmp_path)) in err
    assert len(err.splitlines()) == 1


def test_a_model_that_fits_nowhere_is_told_with_what_it_needs(monkeypatch, capsys, recipe, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text('accelerator = "H100-SXM5-80GB"\ndevices = 8\n')
    config = "model.config={vocab_size=200000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, "
    config += "num_attention_heads=64, num_key_value_heads=8, head_dim=128, tie_word_embeddings=true}"
    code, _, err = run(
        monkeypatch, capsys, "plan", recipe, "--cluster", str(file), "--devices", "1",
        "--precision", "bfloat16", "--set", config,
    )  # fmt: skip
    assert code == 2
    assert "fits 80 GB devices" in err
    assert "give more devices" in err
