"""``headway check``: the table, the JSON, the exit code, and verdicts from what ranks found."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.check import LayoutResult, check_recipe, make_layout
from headway.check.checking import ONE_DEVICE
from headway.check.examination import Difference, Findings
from headway.check.reference import Parameter, Reference
from headway.check.verdict import BOUNDS, judge, refused
from headway.cli.main import app
from headway.errors import RunFailed, UserError
from headway.parallel import Piece
from headway.recipe import load_recipe
from layout_faults import last_bucket_dropped
from tiny_recipes import text_file, text_recipe

EXAMPLES = Path(__file__).parent.parent / "examples"
LLAMA = str(EXAMPLES / "llama-3.1-8b.toml")
CONTRACT = {"layout", "loss_error", "grad_error", "grad_norm_error", "update_error", "passed"}


def run(*arguments: str) -> tuple[int, str, Exception | None]:
    """(exit code, standard output, UserError or RunFailed that main would tell)."""
    result = CliRunner().invoke(app, ["check", *arguments])
    error = result.exception if isinstance(result.exception, UserError | RunFailed) else None
    return result.exit_code, result.stdout, error


def test_layouts_that_hold_are_told_in_a_table_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, printed, _ = run(LLAMA, "--shrink", "--layouts", "dp_shard=2", "--json", str(path))
    assert code == 0
    result = json.loads(path.read_text())
    assert result["holds"]
    assert result["shrunk"]
    assert len(result["reference"]["losses"]) == 3
    one, two = result["layouts"]
    assert (one["layout"], one["ranks"], two["layout"], two["ranks"]) == ("dp_shard=1", 1, "dp_shard=2", 2)
    for layout in result["layouts"]:
        assert layout.keys() >= CONTRACT
        assert layout["passed"] is True
        assert layout["first_difference"] is None
        assert all(0 <= layout[name] <= result["bounds"][name] for name in result["bounds"])
    assert not printed


def test_a_wrong_layout_is_named_with_the_first_parameter_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    last_bucket_dropped(monkeypatch)
    code, printed, _ = run(LLAMA, "--shrink", "--layouts", "dp_shard=2", "--json", "-")
    assert code == 1
    one, two = json.loads(printed)["layouts"]
    assert one["passed"]
    assert two["status"] == "wrong"
    assert two["grad_error"] == pytest.approx(1.0)
    first = two["first_difference"]
    assert first["parameter"] == "model.layers.3.post_attention_layernorm.weight"
    assert first["module"] == "model.layers.3.post_attention_layernorm (LlamaRMSNorm)"
    assert (first["quantity"], first["ratio"], first["parameters"]) == ("gradient", 0.0, 3)


def test_what_can_not_work_is_refused_and_no_fault() -> None:
    code, printed, error = run(LLAMA, "--shrink", "--layouts", "tp=8;dp_shard=3")
    assert isinstance(error, UserError)
    assert "tp=8: layout.tp" in str(error)
    assert "dp_shard=3: run.global_batch" in str(error)
    assert "2 refused" in printed
    result = refused(make_layout(tp=8), "it has 4 heads")
    assert result.passed is None
    assert result.as_json()["grad_error"] is None
    assert code == 1  # as the runner has it; main makes 2 of a UserError


def test_a_recipe_runs_as_it_is_without_shrink(tmp_path: Path) -> None:
    own = text_recipe(text_file(tmp_path / "text.jsonl"), tmp_path / "run", run={"global_batch": 4, "micro_batch": 2})
    result = check_recipe(own, [make_layout(dp_shard=2), make_layout(dp_shard=2, micro_batch=2)])
    assert result.holds
    assert result.recipe is own
    assert [layout.status for layout in result.layouts] == ["passed"] * 3
    assert not (tmp_path / "run").exists()


def test_without_shrink_the_recipes_files_are_needed() -> None:
    with pytest.raises(UserError, match=r"weights/Llama-3\.1-8B"):
        check_recipe(load_recipe(Path(LLAMA)), [])


def test_wrong_input_is_told_before_anything_runs() -> None:
    _, _, error = run(LLAMA, "--shrink", "--layouts", "dp_shards=2")
    assert "did you mean dp_shard?" in str(error)
    _, _, error = run("nowhere.toml", "--shrink")
    assert "no such recipe" in str(error)
    _, _, error = run(LLAMA, "--shrink", "--set", "model.class_name=LlamaForCausalLN")
    assert "LlamaForCausalLN" in str(error)


def test_in_bfloat16_a_layout_may_be_twice_as_far_off_as_one_device() -> None:
    result = check_recipe(load_recipe(Path(LLAMA)), [make_layout(dp_shard=2)], shrink=True, precision="bfloat16")
    one, two = result.layouts
    assert result.holds
    assert 1e-3 < one.errors["grad_error"] < 0.1
    assert result.bounds["grad_error"] == 2 * one.errors["grad_error"]
    assert 0 < two.errors["grad_error"] <= result.bounds["grad_error"]


# Verdicts

WHOLE = Piece((0, 0), (4, 2))
UPPER, LOWER = Piece((0, 0), (2, 2)), Piece((2, 0), (2, 2))
QUANTITIES = ("gradient", "weights_1", "weights_3", "ema_3", "reload_weights_3", "reload_ema_3")


def reference() -> Reference:
    scales = dict.fromkeys(("gradient", "weights_1", "weights_3", "ema_3"), 1.0)
    parameters = [Parameter(name, f"{name} (Linear)", (4, 2), scales) for name in ("first", "second")]
    return Reference(Path(), parameters, [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], False, 24, 0)


def found(piece: Piece, **largest: float) -> Findings:
    """What a rank with ``piece`` of both parameters found; ``quantity_parameter`` = how far off it is."""
    findings = Findings(losses=[2.0, 1.0, 1.0], grad_norms=[1.0, 1.0, 1.0], samples=24)
    for name in ("first", "second"):
        findings.checksums[name] = (piece, 1)
        for quantity in QUANTITIES:
            off = largest.get(f"{quantity}_{name}", 0.0)
            findings.differences.setdefault(quantity, {})[name] = Difference(piece, off, 4.0, 1.0)
    return findings


def verdict(*ranks: Findings, elsewhere: Any = None) -> LayoutResult:
    return judge(ONE_DEVICE, list(ranks), {} if elsewhere is None else elsewhere, reference(), BOUNDS, 1.0)


def test_nothing_is_wrong_with_equal_numbers() -> None:
    assert verdict(found(UPPER), found(LOWER)).passed
    assert verdict(found(WHOLE), found(WHOLE)).passed


def test_the_first_parameter_is_that_of_the_model_and_of_the_earliest_quantity() -> None:
    result = verdict(found(UPPER, weights_1_first=0.5), found(LOWER, gradient_second=0.25, weights_1_second=1.0))
    assert result.errors["grad_error"] == 0.25
    assert result.errors["update_error"] == 1.0
    first = result.first_difference
    assert first is not None
    assert (first.parameter, first.quantity, first.error, first.ratio) == ("second", "gradient", 0.25, 2.0)


def test_no_number_is_as_wrong_as_can_be() -> None:
    result = verdict(found(WHOLE, gradient_first=math.inf))
    assert result.passed is False
    assert result.as_json()["grad_error"] is None
    lost = found(WHOLE)
    lost.losses[1] = math.nan
    assert verdict(lost).errors["loss_error"] == math.inf


def test_a_parameter_that_no_rank_has_is_missed() -> None:
    result = verdict(found(UPPER))
    assert result.passed is False
    assert "2 parameters are on no rank, or in part: first" in str(result.reason)


def test_replicas_must_be_alike_bit_by_bit() -> None:
    other = found(WHOLE)
    other.checksums["second"] = (WHOLE, 2)
    result = verdict(found(WHOLE), other)
    assert result.passed is False
    assert "1 parameters differ between ranks that should hold the same: second" in str(result.reason)


def test_a_missing_gradient_is_one_of_zeros() -> None:
    findings = found(WHOLE)
    findings.without_gradient = ["second"]
    del findings.differences["gradient"]["second"]
    result = verdict(findings)
    assert result.errors["grad_error"] == 1.0
    assert result.first_difference is not None
    assert result.first_difference.parameter == "second"
    assert "1 of 2 parameters have no gradient: second" in str(result.reason)


def test_what_one_device_finds_in_the_checkpoint_counts() -> None:
    elsewhere = {"reload_weights_3": {"first": Difference(WHOLE, 0.5, 1.0, 1.0)}}
    result = verdict(found(WHOLE), elsewhere=elsewhere)
    assert result.errors["reload_error"] == 0.5
    assert "no good checkpoint" in str(verdict(found(WHOLE), elsewhere="no good checkpoint").reason)
