"""A model divided over tp ranks takes the step of one process: every gradient and weight, element by element."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Phi3Config, Phi3ForCausalLM

from divided_models import (
    DECODERS,
    DENOISERS,
    Case,
    Outcome,
    assert_same,
    build,
    component_of,
    divided,
    errors,
    loss_sum,
    named,
    outcomes,
    perturbed_weights,
    step,
    whole,
    with_config,
)
from headway.errors import UserError
from headway.models.component import Component
from headway.parallel import tensor_parallel_plans, tensor_parallel_styles
from headway.parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from headway.parallel.tensor_parallel_styles import Enter, Exit, Part
from headway.recipe import LoraRecipe, ModelRecipe
from ranks import run_ranks
from soak import soak

CPU = torch.device("cpu")


def adapted(recipe: ModelRecipe, *targets: str) -> ModelRecipe:
    return recipe.model_copy(update={"lora": LoraRecipe(rank=4, alpha=8.0, targets=list(targets))})


ONE_KEY_VALUE_HEAD = {"num_key_value_heads": 1}
RECIPES = {
    **DENOISERS,
    **DECODERS,
    "qwen3 with 1 key-value head": with_config(DECODERS["qwen3"], **ONE_KEY_VALUE_HEAD),
    "qwen2.5-vl with 1 key-value head": with_config(
        DECODERS["qwen2_5_vl"], text_config=DECODERS["qwen2_5_vl"].config["text_config"] | ONE_KEY_VALUE_HEAD
    ),
    "adapted qwen3": adapted(
        with_config(DECODERS["qwen3"], **ONE_KEY_VALUE_HEAD),
        *("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
    ),
    "adapted flux": adapted(
        DENOISERS["flux"], *("to_q", "add_k_proj", "to_out.0", "to_add_out", "proj_mlp", "proj_out", "net.2")
    ),
}


@functools.cache
def reference(name: str) -> tuple[dict[str, torch.Tensor], Outcome]:
    """The perturbed weights, and what one process does with them."""
    weights = perturbed_weights(RECIPES[name])
    return weights, outcomes(Case(RECIPES[name], tp=1), weights)[0]


def assert_divided_like_one(name: str, **layout: Any) -> None:
    weights, expected = reference(name)
    for found in outcomes(Case(RECIPES[name], **layout), weights):
        assert_same(found, expected)


@pytest.mark.parametrize("name", [*DENOISERS, soak("adapted flux")])
def test_a_denoiser_takes_the_step_of_one_process(name: str) -> None:
    """Norms over heads and across them, packed projections, adapters; accumulated micro-batches, recomputed blocks."""
    assert_divided_like_one(name, tp=2, checkpointing="full")


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mixtral", "qwen3_moe", "qwen3_vl", "adapted qwen3"),
        *("qwen3 with 1 key-value head", "qwen2.5-vl with 1 key-value head"),
    ],
)
def test_a_decoder_split_over_tokens_takes_the_step_of_one_process(name: str) -> None:
    """Fewer key-value heads than ranks, experts, pictures, tied embeddings, adapters, packed documents."""
    assert_divided_like_one(name, tp=2, sequence=True, checkpointing="full")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "adapted qwen3"])
def test_a_decoder_takes_it_with_whole_activations_too(name: str) -> None:
    assert_divided_like_one(name, tp=2)


@pytest.mark.parametrize("name", ["flux", soak("wan"), "llama", "qwen3_moe"])
def test_two_axes_take_it_together(name: str) -> None:
    """Sharded over data-parallel ranks too: two micro-batches a rank, gradients reduced after the second."""
    assert_divided_like_one(name, tp=2, data=2, sequence=True, checkpointing="selective")


@pytest.mark.parametrize("sequence", [False, True])
def test_more_ranks_than_key_value_heads_share_them(sequence: bool) -> None:
    """Two heads over four ranks: ranks 0 and 1 attend to the first, 2 and 3 to the second."""
    assert_divided_like_one("qwen3", tp=4, sequence=sequence)


def test_values_that_are_there_already_are_divided_without_communication() -> None:
    assert_divided_like_one("qwen3 with 1 key-value head", tp=2, filled=True)


def test_it_is_one_embedding_after_sharding() -> None:
    for outcome in run_ranks(2, _tied, RECIPES["llama"]):
        assert outcome


def _tied(recipe: ModelRecipe) -> bool:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model = divided(Case(recipe), mesh, component_of(recipe), perturbed_weights(recipe))
    return model.lm_head.weight is model.model.embed_tokens.weight


BFLOAT16 = {"flux": False, "wan": False, "qwen3": True}


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_is_as_far_from_float32_as_on_one_process(name: str) -> None:
    weights, exact = reference(name)
    rounded = outcomes(Case(RECIPES[name], tp=1, compute="bfloat16"), weights)[0]
    found = outcomes(Case(RECIPES[name], tp=2, sequence=BFLOAT16[name], compute="bfloat16"), weights)[0]
    assert found.unlike == []
    assert distance(found, exact) < 1.5 * distance(rounded, exact)
    assert 1e-3 < distance(rounded, exact) < 0.1


def distance(found: Outcome, exact: Outcome) -> float:
    """Of all gradients, relative."""
    difference = sum(float((found.gradients[n] - g).square().sum()) for n, g in exact.gradients.items())
    return float((difference / sum(float(g.square().sum()) for g in exact.gradients.values())) ** 0.5)


# What a division leaves as it was


@pytest.mark.parametrize("name", ["llama", "qwen3 with 1 key-value head", soak("adapted flux")])
def test_each_rank_fills_its_part_of_the_weights_of_one_process(name: str) -> None:
    """Also of a vocabulary and of packed weights, and under the same names."""
    built = build(RECIPES[name])
    built.materialize(CPU)
    expected = {name: parameter.detach() for name, parameter in named(built.module)}
    for weights in run_ranks(4, _materialized, RECIPES[name]):
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def _materialized(recipe: ModelRecipe) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    built = build(recipe)
    apply_tensor_parallel(built.components[0].module, mesh["tp"], sequence=True)
    for part in (*(block for _, block in built.blocks), built.module):
        fully_shard(part, mesh=mesh["data"])
    built.materialize(CPU)
    return {name: whole(parameter) for name, parameter in named(built.module)}


def test_only_what_is_in_the_plan_is_changed() -> None:
    for changed in run_ranks(2, _placements, RECIPES["flux"]):
        block = {n.removeprefix("single_transformer_blocks.0."): p for n, p in changed.items() if n[:6] == "single"}
        assert block == {
            "attn.norm_q.weight": (Replicate(),),
            "attn.norm_k.weight": (Replicate(),),
            "attn.to_q.weight": (Shard(0),),
            "attn.to_q.bias": (Shard(0),),
            "attn.to_k.weight": (Shard(0),),
            "attn.to_k.bias": (Shard(0),),
            "attn.to_v.weight": (Shard(0),),
            "attn.to_v.bias": (Shard(0),),
            "proj_mlp.weight": (Shard(0),),
            "proj_mlp.bias": (Shard(0),),
            "proj_out.weight": (Replicate(),),
            "proj_out.bias": (Replicate(),),
        }
        assert {name.split(".")[0] for name in changed} == {"transformer_blocks", "single_transformer_blocks"}


def _placements(recipe: ModelRecipe) -> dict[str, tuple[Any, ...]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = component_of(with_config(recipe, num_single_layers=1)).module
    apply_tensor_parallel(model, mesh, sequence=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    return {name: p.placements for name, p in named(model) if isinstance(p, DTensor)}


# What it costs


@pytest.mark.parametrize("sequence", [False, True])
def test_a_layer_costs_two_collectives_forward_and_two_backward(sequence: bool) -> None:
    """Or a gather and a scatter in the place of each, which move as many bytes."""
    for shallow, deep in run_ranks(2, _collectives, RECIPES["qwen3"], sequence):
        layer = {name: deep[name] - shallow.get(name, 0) for name in deep if deep[name] != shallow.get(name, 0)}
        expected = {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4} if sequence else {"all_reduce": 4}
        assert layer == expected


def _collectives(recipe: ModelRecipe, sequence: bool) -> list[dict[str, int]]:
    """Of one micro-batch through models of one and of two layers, by operator."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    counts = []
    for layers in (1, 2):
        case = Case(with_config(recipe, num_hidden_layers=layers), sequence=sequence)
        weights = perturbed_weights(case.recipe)
        model = divided(case, mesh, component_of(case.recipe), weights)
        model.set_requires_gradient_sync(False)
        with CommDebugMode() as mode:
            loss_sum(case, model, 0).backward()
        counts.append({operator.__name__.split(".")[0]: n for operator, n in mode.get_comm_counts().items()})
    return counts


def test_equal_blocks_share_compiled_code() -> None:
    for frames, error in run_ranks(2, _compiled, RECIPES["qwen3"], timeout_s=200):
        assert frames == 1
        assert error < 1e-5


def _compiled(recipe: ModelRecipe) -> tuple[int, float]:
    """(graphs for all blocks, error of the gradients)."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    weights = perturbed_weights(recipe)
    counter = CompileCounter()
    gradients = []
    for compiler in (None, counter):
        case = Case(recipe, sequence=True, compiler=compiler)
        model = divided(case, mesh, build(recipe).components[0], weights)
        loss_sum(case, model, 0).backward()
        gradients.append(torch.cat([p.grad.to_local().flatten() for _, p in named(model)]))
    return counter.frame_count, float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())


# What would be wrong in silence


def _plant(fault: str) -> None:
    """Each of these keeps all shapes, and most of them the loss."""
    plans: Any = tensor_parallel_plans
    styles: Any = tensor_parallel_styles
    if fault == "norms of heads keep a part of their gradient":
        plans.PartialGradients.apply = lambda self, module, division: None
    elif fault == "a norm across heads sees a rank's heads":
        styles.summed = lambda part, mesh: part * mesh.size()
    elif fault == "all ranks attend to the first key-value head":
        plans.KeyValueColumn.part = lambda self, layer, division: Part(Replicate(), Replicate(), 0, ((0, 8),))
    elif fault == "gradients of what enters stay parts":
        plans.shared = lambda whole, mesh: whole
    elif fault == "packed streams are divided as one":
        plans.PackedRow.part = lambda self, layer, division: Part(Shard(1), Shard(1))


FAULTS = {
    "norms of heads keep a part of their gradient": "qwen3",
    "a norm across heads sees a rank's heads": "wan",
    "all ranks attend to the first key-value head": "qwen3",
    "gradients of what enters stay parts": "llama",
    "packed streams are divided as one": "flux",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_a_planted_fault(fault: str) -> None:
    name = FAULTS[fault]
    weights, expected = reference(name)
    tp = 4 if "key-value" in fault else 2
    case = Case(RECIPES[name], tp=tp)
    found = run_ranks(tp, _faulty, fault, case, component_of(case.recipe), weights)[0]
    assert max(errors(found, expected).values()) > 1e-2


def _faulty(fault: str, case: Case, component: Component, weights: dict[str, torch.Tensor]) -> Outcome:
    _plant(fault)
    return step(case, component, weights)


# What can't be


@pytest.mark.parametrize(
    ("recipe", "size", "message"),
    [
        (DENOISERS["flux"], 3, r"layout.tp = 3: 4 attention heads can't be divided by 3 .*; it can be 2 or 4"),
        (DECODERS["qwen3"], 8, r"layout.tp = 8: 4 attention heads can't be divided by 8 .*; it can be 4"),
        (
            with_config(DECODERS["qwen3"], num_attention_heads=12, num_key_value_heads=3, intermediate_size=96),
            2,
            r"layout.tp = 2: 3 key-value heads can't be divided by 2, nor 2 by them .*k_proj\); it can be 1 or 3",
        ),
        (with_config(DENOISERS["wan"], ffn_dim=66), 4, r"layout.tp = 4: 66 output features .*ffn.net.0.proj.*can be 2"),
        (with_config(DENOISERS["sana"], mlp_ratio=1.0625), 8, r"layout.tp = 8: 4 attention heads"),
        (with_config(DENOISERS["pixart"], activation_fn="geglu"), 2, r"layout.tp: .*ff has a gated activation"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_nearest_that_can(
    recipe: ModelRecipe, size: int, message: str
) -> None:
    model = component_of(recipe).module
    with pytest.raises(UserError, match=message):
        check_tensor_parallel(model, size)
    check_tensor_parallel(component_of(DECODERS["qwen3"]).module, 4)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UserError, match=r"layout.tp: there is no tensor-parallel plan for Linear: set layout.tp = 1"):
        check_tensor_parallel(nn.Linear(2, 2), 2)


def test_a_style_that_is_not_known_is_refused() -> None:
    with torch.device("meta"):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = Phi3ForCausalLM(Phi3Config(vocab_size=64, pad_token_id=0, **sizes))
    with pytest.raises(UserError, match=r"layout.tp: Phi3Model asks for colwise_gather_output of layers.*qkv_proj"):
        check_tensor_parallel(model, 2)


def test_a_sequence_that_does_not_split_is_refused() -> None:
    for message in run_ranks(2, _odd_sequence, RECIPES["llama"]):
        assert message.startswith("layout.sequence_parallel: 7 tokens can't be split over layout.tp = 2")


def _odd_sequence(recipe: ModelRecipe) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model = divided(Case(recipe, sequence=True), mesh, component_of(recipe), perturbed_weights(recipe))
    with pytest.raises(UserError) as refusal:
        model(input_ids=torch.zeros(1, 7, dtype=torch.int64))
    return str(refusal.value)


def test_blocks_of_other_stages_are_left_alone() -> None:
    """A decoder of which this rank has the last layers and the head: what comes from the stage before is split."""
    model = build(RECIPES["qwen3"]).components[0].module
    model.model.layers[0] = model.model.embed_tokens = nn.Identity()
    steps = tensor_parallel_plans.steps_of(model, sequence=True)
    assert not any(step.path.startswith("model.layers.0") for step in steps)
    ends = {kind: [step.path for step in steps if isinstance(step.style, kind)] for kind in (Enter, Exit)}
    assert "model.layers.1" not in ends[Enter]
    assert "model.layers.1" in ends[Exit]
    assert steps[-1].path == "lm_head"
