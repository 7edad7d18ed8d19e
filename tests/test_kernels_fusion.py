"""Models with fused operators take the step of the library's own, keep their names, and fit every layout."""

import functools
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from transformers import GemmaConfig, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from commands import run
from divided_models import (
    DECODERS,
    DENOISERS,
    Case,
    Outcome,
    assert_same,
    build,
    component_of,
    divided,
    loss_sum,
    named,
    outcomes,
    perturbed_weights,
)
from headway.kernels.fusion import Fusion, fuse
from headway.kernels.fusion.pattern import function_code
from headway.models.build import repeated_blocks
from headway.recipe import LoraRecipe
from headway.runs import read_metrics
from ranks import run_ranks
from runs import run_to_end
from soak import soak
from tiny_recipes import text_file, text_recipe

RECIPES = DENOISERS | DECODERS
FUSED_MODULES = {
    "llama": ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention"),
    "qwen3": ("Qwen3MLP", "Qwen3Attention"),
    "qwen3_moe": ("Qwen3MoeExperts", "Qwen3MoeAttention"),
    "mixtral": ("MixtralExperts", "MixtralRMSNorm", "MixtralAttention"),
    "qwen2_5_vl": ("Qwen2_5_VLMLP", "Qwen2MLP", "Qwen2_5_VLAttention"),
    "qwen3_vl": ("Qwen3VLTextAttention",),
    "flux": ("AdaLayerNormZero", "AdaLayerNormZeroSingle", "AdaLayerNormContinuous", "FluxAttention"),
    "sd3": ("AdaLayerNormZero", "Attention"),
    "wan": ("WanAttention",),
}
FUSED_BLOCKS = {
    "flux": "FluxTransformerBlock",
    "sd3": "JointTransformerBlock",
    "wan": "WanTransformerBlock",
    "pixart": "BasicTransformerBlock",
    "sana": "SanaTransformerBlock",
    "llama": "LlamaDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen2_5_vl": "Qwen2_5_VLVisionBlock",
    "qwen3_vl": "Qwen3VLTextDecoderLayer",
}


@functools.cache
def reference(name: str, compute: str = "float32") -> tuple[dict[str, torch.Tensor], Outcome]:
    """The perturbed weights, and what one process does with them without fused operators."""
    weights = perturbed_weights(RECIPES[name])
    return weights, outcomes(Case(RECIPES[name], tp=1, compute=compute), weights)[0]


def fusion_of(name: str) -> tuple[Any, Fusion]:
    model = build(RECIPES[name]).components[0].module
    return model, fuse(model)


def assert_fused_like_library(name: str, **layout: Any) -> None:
    weights, expected = reference(name)
    for found in outcomes(Case(RECIPES[name], fused=True, **layout), weights):
        assert_same(found, expected)


@pytest.mark.parametrize("name", FUSED_BLOCKS)
def test_a_fused_model_takes_the_step_of_the_library(name: str) -> None:
    """Every gradient and weight, element by element, with perturbed norms and gates; blocks recomputed too."""
    assert_fused_like_library(name, tp=1, checkpointing="full")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("flux", {"tp": 2}),
        ("flux", {"tp": 1, "data": 2, "checkpointing": "selective"}),
        ("wan", {"tp": 2}),
        ("llama", {"tp": 2, "sequence": True}),
        ("llama", {"tp": 1, "data": 2, "checkpointing": "selective"}),
        ("qwen3_moe", {"tp": 2}),
        soak("qwen3", {"tp": 2, "data": 2, "sequence": True, "checkpointing": "full"}),
        soak("sd3", {"tp": 2}),
        soak("flux", {"tp": 2, "data": 2, "checkpointing": "full"}),
    ],
)
def test_it_takes_it_in_any_layout(name: str, layout: dict[str, Any]) -> None:
    assert_fused_like_library(name, **layout)


@pytest.mark.parametrize("name", [soak("flux"), "wan", "qwen3"])
def test_in_bfloat16_it_is_no_farther_from_float32(name: str) -> None:
    weights, exact = reference(name)
    _, library = reference(name, "bfloat16")
    found = outcomes(Case(RECIPES[name], tp=1, compute="bfloat16", fused=True), weights)[0]
    assert 1e-3 < distance(library, exact) < 0.1
    assert distance(found, exact) < 2 * distance(library, exact)


def distance(found: Outcome, exact: Outcome) -> float:
    """Of all gradients, relative."""
    difference = sum(float((found.gradients[n] - g).square().sum()) for n, g in exact.gradients.items())
    return float((difference / sum(float(g.square().sum()) for g in exact.gradients.values())) ** 0.5)


@pytest.mark.parametrize("name", RECIPES)
def test_names_tensors_and_modules_stay(name: str) -> None:
    model = build(RECIPES[name]).components[0].module
    tensors = {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}
    modules = {path: (id(module), type(module).__name__) for path, module in model.named_modules()}
    blocks = [path for path, _ in repeated_blocks(model)]
    fuse(model)
    assert {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()} == tensors
    assert {path: (id(module), type(module).__name__) for path, module in model.named_modules()} == modules
    assert [path for path, _ in repeated_blocks(model)] == blocks


PHI3: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def _feed_forward(activation: str) -> nn.Module:
    return diffusers.models.attention.FeedForward(16, activation_fn=activation)


@pytest.mark.parametrize(
    ("make", "kind", "operator"),
    [
        (lambda: _feed_forward("geglu"), "GEGLU", "glu"),
        (lambda: _feed_forward("swiglu"), "SwiGLU", "glu"),
        (lambda: Phi3MLP(Phi3Config(**PHI3, pad_token_id=0)), "Phi3MLP", "glu"),
        (lambda: GemmaMLP(GemmaConfig(hidden_size=16, intermediate_size=24)), "GemmaMLP", "glu"),
        (lambda: GemmaRMSNorm(16), "GemmaRMSNorm", "rms_norm"),
    ],
)
def test_a_module_alone_computes_what_the_library_does(make: Any, kind: str, operator: str) -> None:
    torch.manual_seed(0)
    module = make().double()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    width = next(p.shape[-1] for p in module.parameters())
    x = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
    right = _output_and_gradients(module, x)
    assert [(each.kind, each.operators) for each in fuse(module).fused] == [(kind, (operator,))]
    for value, expected in zip(_output_and_gradients(module, x), right, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)  # norms of the library: float32


def _output_and_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    output = module(x)
    return [output, *torch.autograd.grad(output.sin().sum(), [x, *module.parameters()])]


def test_an_activation_that_is_none_of_the_operator_is_left() -> None:
    config = GemmaConfig(hidden_size=16, intermediate_size=24, hidden_act="relu")
    (left,) = fuse(GemmaMLP(config)).left
    assert "ReLU" in left.reason


@pytest.mark.parametrize(("name", "kind"), FUSED_BLOCKS.items())
def test_every_block_is_told_of_as_fused(name: str, kind: str) -> None:
    model, fusion = fusion_of(name)
    assert {each.kind for each in fusion.fused} >= {*FUSED_MODULES.get(name, ())}
    blocks = {path for path, module in model.named_modules() if type(module).__name__ == kind}
    assert {each.path for each in fusion.fused if each.kind == kind} == blocks != set()
    assert not blocks & {each.path for each in fusion.left}
    assert any(line.startswith(f"fused: {len(blocks)} {kind}: ") for line in fusion.summary())


def test_a_block_whose_code_is_not_the_known_one_is_left_and_told_of() -> None:
    model = build(RECIPES["flux"]).components[0].module
    block = model.transformer_blocks[0]
    kind = type(block)

    class FluxTransformerBlock(kind):  # type: ignore[misc, valid-type]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return kind.forward(self, *arguments, **keywords)

    block.__class__ = FluxTransformerBlock
    fusion = fuse(model)
    assert type(block) is FluxTransformerBlock
    left = {each.path: each.reason for each in fusion.left}
    assert "not the one that is known" in left["transformer_blocks.0"]
    assert {each.path for each in fusion.fused if each.kind == "FluxTransformerBlock"} == {"transformer_blocks.1"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block, "norm2", nn.LayerNorm(64)), "its norm is LayerNorm"),
        (lambda block: block.norm2.register_forward_hook(lambda *_: None), "has hooks"),
    ],
)
def test_a_block_of_known_code_and_other_parts_is_left(change: Any, reason: str) -> None:
    model = build(RECIPES["flux"]).components[0].module
    change(model.transformer_blocks[0])
    assert any(reason in each.reason for each in fuse(model).left if each.path == "transformer_blocks.0")


def test_code_is_compared_without_names_annotations_and_comments() -> None:
    def one(x: int) -> int:
        """What it does."""
        return x + 1

    def same(x, /):
        return x + 1  # why

    def renamed(x: float) -> float:
        return x + 1

    def other(x: int) -> int:
        return x + 2

    assert function_code(one) == function_code(renamed)
    assert function_code(one) != function_code(other)
    assert function_code(one) != function_code(same)


@pytest.mark.parametrize("name", [soak("flux"), "wan", "qwen3"])
def test_a_fused_block_compiles_whole_and_equal_blocks_share_it(name: str) -> None:
    """Beside the first block, whose inputs need other gradients, at most one graph for each kind of block."""
    for frames, error in run_ranks(1, _compiled, name, timeout_s=200):
        assert frames <= 3
        assert error < 1e-5


def _compiled(name: str) -> tuple[int, float]:
    """(graphs for all blocks, error of the gradients)."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tp"))
    weights = perturbed_weights(RECIPES[name])
    counter = CompileCounter()
    gradients = []
    for case in (Case(RECIPES[name], fused=False), Case(RECIPES[name], fused=True, compiler=counter)):
        model = divided(case, mesh, build(RECIPES[name]).components[0], weights)
        loss_sum(case, model, 0).backward()
        gradients.append(torch.cat([p.grad.flatten() for _, p in named(model)]))
    return counter.frame_count, float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())


@pytest.mark.parametrize("targets", [["to_q", "linear", "net.2"]])
def test_adapters_within_fused_modules_are_trained(targets: list[str]) -> None:
    recipe = RECIPES["flux"].model_copy(update={"lora": LoraRecipe(rank=2, alpha=4.0, targets=targets)})
    weights = perturbed_weights(recipe)
    expected = outcomes(Case(recipe, tp=1), weights)[0]
    found = outcomes(Case(recipe, tp=1, fused=True), weights)[0]
    assert_same(found, expected)
    assert len(found.gradients) == sum("lora" in name for name, _ in named(component_of(recipe).module))


@pytest.mark.parametrize("fused", [True, soak("auto")])
def test_a_run_fuses_when_it_is_told_to_and_writes_it_down(fused: Any, tmp_path: Path) -> None:
    """auto: on CUDA only. Losses are those of the library's own code."""
    file = text_file(tmp_path / "text.jsonl")
    losses = []
    for name, fuses in (("library", False), ("fused", fused)):
        recipe = text_recipe(file, tmp_path / name, kernels={"fuse": fuses}, run={"steps": 4})
        run_to_end(recipe)
        losses.append([line["loss"] for line in read_metrics(tmp_path / name)])
    events = [json.loads(line) for line in (tmp_path / "fused" / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "fused"]
    assert len(told) == (fused is True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert all("rms_norm" in event["message"] for event in told)


def test_the_command_tells_what_is_fused_and_what_is_left(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = run(monkeypatch, capsys, "kernels", "fuse", "examples/demo.toml", "--json", "-")
    result = json.loads(out)
    assert code == 0
    assert {"JointTransformerBlock", "AdaLayerNormZero"} <= {each["kind"] for each in result["fused"]}
    assert all(each["reason"] for each in result["left"])
