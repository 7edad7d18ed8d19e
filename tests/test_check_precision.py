"""``headway check --precision recipe``: float8 products beside bfloat16 and float32, as far as rounding takes them."""

import math
from pathlib import Path

import pytest
import torch

from headway.check import check_recipe, make_layout
from headway.check.rounding import one_device_bound, product_error, rounding_error
from headway.check.setting import recipe_of_layout, recipe_of_reference
from headway.recipe import Recipe, load_recipe
from soak import soak

LLAMA = Path(__file__).parent.parent / "examples" / "llama-3.1-8b.toml"
FORMATS = {"bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def low(matmul: str) -> Recipe:
    return load_recipe(LLAMA, [f"precision.matmul={matmul}", "precision.stochastic_rounding=false"])


@pytest.mark.parametrize("number_format", FORMATS)
def test_rounding_is_as_far_off_as_the_analysis_says(number_format: str) -> None:
    mantissas = torch.exp2(torch.rand(2**18, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    rounded = mantissas.float().to(FORMATS[number_format]).double()
    measured = float(((rounded - mantissas) / mantissas).square().mean().sqrt())
    assert measured == pytest.approx(rounding_error(number_format), rel=0.01)


def test_errors_of_both_operands_add_up_in_squares() -> None:
    assert product_error(low("mxfp8"), "recipe") == pytest.approx(math.sqrt(2) * rounding_error("e4m3"))
    assert product_error(low("mxfp8"), "bfloat16") == pytest.approx(math.sqrt(2) * rounding_error("bfloat16"))
    assert product_error(low("mxfp8"), "float32") == 0
    assert one_device_bound(low("float8_tensorwise"), "recipe") > one_device_bound(low("float8_rowwise"), "recipe")


def test_layouts_have_the_recipes_products_and_the_reference_has_none(tmp_path: Path) -> None:
    recipe = low("float8_rowwise")
    layout = make_layout(dp_shard=2)
    assert recipe_of_layout(recipe, layout, "recipe", tmp_path).precision.matmul == "float8_rowwise"
    assert recipe_of_layout(recipe, layout, "recipe", tmp_path).precision.master == "float32"
    assert recipe_of_layout(recipe, layout, "bfloat16", tmp_path).precision.matmul == "compute"
    assert recipe_of_reference(recipe, tmp_path).precision.compute == "float32"


@pytest.mark.parametrize("matmul", [soak("float8_tensorwise"), soak("float8_rowwise"), soak("mxfp8")])
def test_layouts_in_float8_are_as_near_to_float32_as_one_device(matmul: str) -> None:
    layouts = [make_layout(dp_shard=2), make_layout(tp=2), make_layout(pp=2)]
    result = check_recipe(low(matmul), layouts, shrink=True, precision="recipe")
    assert result.holds
    one, high, *_ = result.layouts
    assert (one.layout, high.layout) == ("dp_shard=1", "matmul=compute")
    # Of bfloat16 alone, with 16 times as fine a rounding, there is less.
    assert high.errors["grad_error"] < 0.5 * one.errors["grad_error"]
    assert one.errors["grad_error"] < one_device_bound(result.recipe, "recipe")
