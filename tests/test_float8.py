"""float8 products: which layers take part, how exact they are, and that layouts, recomputation and resume keep them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import UserError
from headway.models import build_model
from headway.parallel import lower_products
from headway.parallel.float8 import check_divided, check_float8
from headway.parallel.mxfp8 import swizzled
from headway.recipe import LayoutRecipe, PrecisionRecipe, Recipe
from ranks import run_ranks
from soak import soak
from test_layout_invariance import train
from test_stochastic_adamw import trained
from tiny_models import DIFFUSION, LANGUAGE, word_tokenizer
from tiny_recipes import text_file, text_recipe

pytest.importorskip("torchao")

KINDS = ["float8_tensorwise", "float8_rowwise", "mxfp8"]
CPU = torch.device("cpu")
E4M3, E5M2 = (2.0**-bits / math.sqrt(12) * math.sqrt(0.75 / (2 * math.log(2))) for bits in (3, 2))
"""Root mean square of the relative error of rounding to 3 or 2 bits of mantissa: uniform within a unit in the last
place, of mantissas whose logarithms are uniform. Of a product the errors of both operands add up in squares."""


def built(name: str, recipes: dict[str, Any]) -> Any:
    made = {"text_encoder": word_tokenizer(), "text_encoder_2": word_tokenizer()}
    encoders = recipes[name].text_encoders
    return build_model(recipes[name], PrecisionRecipe(), seed=0, tokenizers={n: made[n] for n in encoders})


def lowered(model: Any, **keys: Any) -> list[str]:
    main = set(model.components[0].module.modules())
    blocks = [(name, block) for name, block in model.blocks if block in main]
    return lower_products(model.module, blocks, PrecisionRecipe(matmul="float8_rowwise", **keys), CPU)


def test_blocks_in_the_middle_take_part_without_modulation_and_norms():
    names = lowered(built("flux", DIFFUSION))
    middle = ("transformer.transformer_blocks.1.", "transformer.single_transformer_blocks.0.")
    assert all(name.startswith(middle) for name in names)
    assert "transformer.transformer_blocks.1.attn.to_q" in names
    assert "transformer.single_transformer_blocks.0.proj_mlp" in names
    assert not any("norm" in name for name in names)


def test_the_list_of_what_stays_is_the_recipes():
    first = "model.layers.0."
    everything = lowered(built("qwen3", LANGUAGE), keep_high=[])
    assert {name.split(".")[2] for name in everything} == {"0", "1"}
    assert not any("lm_head" in name or "embed" in name for name in everything)
    some = lowered(built("qwen3", LANGUAGE), keep_high=["last_block", "*.k_proj", f"{first}mlp.*"])
    assert some == [f"{first}self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj")]


def test_nothing_left_to_lower_is_refused():
    with pytest.raises(UserError, match="no layer is left"):
        lowered(built("qwen3", LANGUAGE))  # of two blocks one is the first, one the last
    frozen = built("qwen3", LANGUAGE)
    frozen.module.requires_grad_(False)
    with pytest.raises(UserError, match="do not train"):
        lowered(frozen, keep_high=[])


def products(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A layer, the same in float8, and an input of 70 tokens, which no block divides."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"block": nn.ModuleDict({"layer": nn.Linear(128, 96)})}).to(dtype)
    low = nn.ModuleDict({"block": nn.ModuleDict({"layer": nn.Linear(128, 96)})}).to(dtype)
    low.load_state_dict(plain.state_dict())
    precision = PrecisionRecipe(matmul=kind, keep_high=[])
    assert lower_products(low, [("block", low["block"])], precision, CPU) == ["block.layer"]
    return plain["block"]["layer"], low["block"]["layer"], torch.randn(2, 35, 128, dtype=dtype)


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).double().norm() / right.double().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_as_far_from_float32_as_rounding_of_their_operands_says(kind):
    plain, low, x = products(kind)
    upstream = torch.randn(2, 35, 96)
    results = []
    for layer in (plain, low):
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        gradients = torch.autograd.grad(output, [leaf, layer.weight, layer.bias], upstream)
        results.append([output.detach() - layer.bias.detach(), *gradients])
    of_gradient = E5M2 if kind == "float8_tensorwise" else E4M3
    expected = [math.hypot(E4M3, E4M3), math.hypot(of_gradient, E4M3), math.hypot(of_gradient, E4M3)]
    for found, right, error in zip(results[1][:3], results[0][:3], expected, strict=True):
        assert 0.75 * error < relative(found, right) < 1.15 * error
    assert relative(results[1][3], results[0][3]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_of_parameters_stay(kind):
    plain, low, _ = products(kind)
    for name, value in plain.state_dict().items():
        assert torch.equal(low.state_dict()[name], value)
    assert list(dict(low.named_parameters())) == ["weight", "bias"]


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_finds_the_same_scales(kind):
    _, low, x = products(kind, torch.bfloat16)
    gradients = []
    for forward in (low, lambda leaf: checkpoint(low, leaf, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(forward(leaf).square().sum(), [leaf, low.weight]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_graph_compiles_around_the_products(kind):
    _, low, x = products(kind)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    eager = torch.autograd.grad(low(leaf).square().sum(), [leaf, low.weight])
    compiled = torch.compile(low, fullgraph=True, backend="aot_eager")(other)
    for found, right in zip(torch.autograd.grad(compiled.square().sum(), [other, low.weight]), eager, strict=True):
        torch.testing.assert_close(found, right)


def test_scales_lie_in_the_order_of_tensor_cores():
    blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.arange(200 * 6).remainder(251).to(torch.uint8).view(200, 6)
    found = swizzled(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert torch.equal(found, blocked(scales).flatten())


def recipe(
    tmp_path: Path, kind: str, *, precision: dict[str, Any] | None = None, layers: int = 2, **sections: Any
) -> Recipe:
    low = {"compute": "bfloat16", "matmul": kind, "keep_high": []} | (precision or {})
    sections["run"] = {"steps": 4, "micro_batch": 2} | sections.get("run", {})
    made = text_recipe(text_file(tmp_path / "text.jsonl"), tmp_path / "run", precision=low, **sections)
    config = made.model.config | {"num_hidden_layers": layers}
    return made.model_copy(update={"model": made.model.model_copy(update={"config": config})})


LAYOUTS = [
    (2, {"dp_shard": 2}, {}),
    (2, {"dp_shard": 2}, {"float8_all_gather": True}),
    soak(2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    soak(2, {"cp": 2}, {}),
    soak(4, {"pp": 2, "pp_schedule": "zbv", "tp": 2}, {}),
    soak(4, {"dp_replicate": 2, "dp_shard": 2}, {"float8_all_gather": True}),
]


@pytest.mark.parametrize(("world", "layout", "precision"), LAYOUTS)
def test_layouts_train_alike(tmp_path, world, layout, precision):
    kind, layers = "float8_tensorwise", 2 * layout.get("pp", 1)
    (alone,) = run_ranks(1, train, recipe(tmp_path, kind, layers=layers))
    (high,) = run_ranks(1, train, recipe(tmp_path, "compute", layers=layers))
    assert alone["losses"] != high["losses"]
    for found in run_ranks(world, train, recipe(tmp_path, kind, precision=precision, layers=layers, layout=layout)):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        assert found["norms"] == pytest.approx(alone["norms"], rel=2e-2)
        assert found["model"].keys() <= high["model"].keys()


@pytest.mark.parametrize("kind", ["mxfp8", soak("float8_rowwise")])
def test_stages_and_shards_of_tensor_parallelism_train_alike(tmp_path, kind):
    (alone,) = run_ranks(1, train, recipe(tmp_path, kind))
    layout = {"pp": 2, "tp": 2, "pp_schedule": "1f1b"}
    for found in run_ranks(4, train, recipe(tmp_path, kind, layout=layout)):
        assert found["losses"] == pytest.approx(alone["losses"], rel=2e-3)


@pytest.mark.parametrize(
    ("world", "kind", "precision"),
    [(1, "float8_rowwise", {}), (2, "float8_tensorwise", {"float8_all_gather": True}), soak(1, "mxfp8", {})],
)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path, world, kind, precision):
    layout = {"dp_shard": world}
    low = recipe(tmp_path, kind, precision=precision, layout=layout, memory={"activation_checkpointing": "selective"})
    whole, resumed = (run_ranks(world, trained, low, resume)[0] for resume in (False, True))
    assert whole[0] == resumed[0]
    torch.testing.assert_close(whole[1], resumed[1], rtol=0, atol=0)
    assert whole[0][-1] < whole[0][0]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_activations_change_no_bit(tmp_path, mode):
    kept, again = (
        run_ranks(1, train, recipe(tmp_path, "float8_rowwise", memory={"activation_checkpointing": each}))[0]
        for each in ("none", mode)
    )
    assert kept["losses"] == again["losses"]
    torch.testing.assert_close(kept["model"], again["model"], rtol=0, atol=0)


def test_gathers_of_float8_with_other_products_or_layouts_are_refused(tmp_path):
    with pytest.raises(UserError, match='needs matmul = "float8_tensorwise"'):
        recipe(tmp_path, "mxfp8", precision={"float8_all_gather": True})
    precision = PrecisionRecipe(matmul="float8_tensorwise", float8_all_gather=True)
    with pytest.raises(UserError, match=r"set layout\.tp = 1"):
        check_float8(precision, LayoutRecipe(tp=2), CPU)


def test_parts_of_weights_that_tensor_cores_do_not_take_are_refused():
    layers = nn.ModuleDict({"up": nn.Linear(32, 48)})
    check_divided(layers, ["up", "of another stage"], PrecisionRecipe(matmul="float8_rowwise"), 1)
    with pytest.raises(UserError, match=r'\[48, 32\] of up.*add "\*up" to precision.keep_high'):
        check_divided(layers, ["up"], PrecisionRecipe(matmul="mxfp8"), 2)


@pytest.mark.parametrize(
    ("capability", "kind", "nearest"),
    [((8, 0), "float8_rowwise", "compute"), ((9, 0), "mxfp8", "float8_rowwise"), ((9, 0), "float8_rowwise", None)],
)
def test_a_gpu_without_the_products_is_refused_with_the_nearest_it_has(monkeypatch, capability, kind, nearest):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    precision = PrecisionRecipe(matmul=kind)
    if nearest is None:
        check_float8(precision, LayoutRecipe(), torch.device("cuda"))
        return
    with pytest.raises(UserError, match=f'set "{nearest}"'):
        check_float8(precision, LayoutRecipe(), torch.device("cuda"))
