"""Experts split over ranks: every parameter's gradient is that of one process, in every layout; and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from headway.errors import UserError
from headway.models import build_model
from headway.parallel import Masters, Meshes, checkpoint_activations, cross_entropy_sum, expert_parallel, shard
from headway.parallel.expert_parallel import apply_expert_parallel, check_expert_parallel, expert_modules
from headway.parallel.pipeline import Pipeline, StagedModel, plan_pipeline, split_into_stages
from headway.recipe import ModelRecipe, PrecisionRecipe
from mixtures import (
    Layout,
    Routing,
    Step,
    divide,
    global_batch,
    lay_out,
    loss_sum,
    losses_of,
    micro_batches,
    mixture,
    over,
    predict,
    reference,
    summed,
    take_step,
    train,
    worst_error,
)
from ranks import run_ranks
from soak import soak
from tiny_models import DENSE, LANGUAGE

PLAIN = Routing()
STRONG = Routing(balance=1.0, z=0.01)

LAYOUTS = {
    "ep2": over(shard=2, ep=2),
    "ep4": over(shard=4, ep=4, micro_batch=1),
    "ep2, experts sharded over 2": over(shard=4, ep=2, micro_batch=1),
    "ep2 of cp2": over(cp=2, ep=2),
    "ep4 of 2 x cp2": over(shard=2, cp=2, cp_kind="ring", ep=4, checkpointing="full"),
    "ep2 in each of 2 replicas": over(dp_replicate=2, shard=2, ep=2, micro_batch=1),
    "ep2, compiled and recomputed": over(shard=2, ep=2, micro_batch=4, checkpointing="full", compiled=True),
}

DEAR = ("ep4", "ep2 of cp2", "ep2 in each of 2 replicas")
"""Held by the rest, which have what they have and more."""


def same_as_one_process(found: Step, expected: Step) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=2e-6)
    error, name = worst_error(found, expected)
    assert error < 5e-6, name
    assert found.squared_norm == pytest.approx(expected.squared_norm, rel=1e-5)


@pytest.mark.parametrize("name", [soak(name) if name in DEAR else name for name in LAYOUTS])
def test_gradients_and_their_norm_are_those_of_one_process(name: str) -> None:
    expected = reference("qwen3_moe", PLAIN)
    for rank in run_ranks(LAYOUTS[name].ranks, train, "qwen3_moe", LAYOUTS[name], PLAIN):
        same_as_one_process(rank[0], expected)


@pytest.mark.parametrize(("ep", "sequence"), [soak(2, False), (4, True)])
def test_tensor_parallel_ranks_send_each_token_once(ep: int, sequence: bool) -> None:
    expected = reference("mixtral", PLAIN)
    for rank in run_ranks(4, train, "mixtral", over(shard=2, tp=2, ep=ep, sequence_parallel=sequence), PLAIN):
        same_as_one_process(rank[0], expected)


@pytest.mark.parametrize("layout", [soak(over(shard=4, ep=4, micro_batch=1)), over(shard=2, tp=2, ep=4)])
def test_ranks_without_tokens_take_part(layout: Layout) -> None:
    """All tokens choose the experts of the first rank."""
    expected = reference("mixtral", PLAIN, crowded=True)
    assert expected.report.load.tolist() == [4, 4]
    for rank in run_ranks(4, train, "mixtral", layout, PLAIN, 1, True):
        same_as_one_process(rank[0], expected)


def test_updates_are_those_of_one_process() -> None:
    expected = run_ranks(1, train, "qwen3_moe", over(micro_batch=8), PLAIN, 3)[0]
    found = run_ranks(4, train, "qwen3_moe", over(shard=4, ep=2, micro_batch=1), PLAIN, 3)[0]
    assert [step.loss for step in found] == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert worst_error(found[2], expected[2])[0] < 1e-4


# Experts in the stages of a pipeline

STAGED = {"num_hidden_layers": 4, "pad_token_id": None}


def pipelined(schedule: str, checkpointing: Any) -> tuple[dict[str, Tensor], Tensor, float]:
    """This rank's gradients, its share of the loss, and the balance loss, with all losses of routers."""
    layout = over(pp=2, shard=2, ep=2, pp_schedule=schedule, micro_batch=1)
    meshes = Meshes(layout.recipe, dist.get_rank(), dist.get_world_size(), "cpu")
    model = mixture("qwen3_moe", **STAGED)
    recipe = ModelRecipe(class_name="Qwen3MoeForCausalLM", config=model.config.to_diff_dict())
    precision = PrecisionRecipe(compute="float32")
    built = build_model(recipe, precision, seed=0)
    losses = losses_of(built.module, STRONG)
    plan = plan_pipeline(layout.recipe, built.module, micro_batches=4, compiled=False)
    split = split_into_stages(built.module, plan, meshes.stage)
    for stage in split.stages:
        part = built.on_stage(stage.module, stage.own([name for name, _ in built.blocks]))
        blocks = [block for _, block in part.blocks]
        apply_expert_parallel(part.module, meshes.expert["ep"], None)
        losses.attach(part.module, blocks)
        checkpoint_activations(blocks, checkpointing)
        shard(part.module, blocks, meshes, precision, layout.recipe)
        part.components[0].fill(torch.device("cpu"), dict(model.named_parameters()))
        part.module.to("cpu")
    staged = StagedModel(split, meshes.pp.get_group())
    loss_of = lambda logits, batch: cross_entropy_sum(logits, batch["labels"], -100)  # noqa: E731
    pipeline = Pipeline(staged, predict, loss_of, device=torch.device("cpu"), dtype=torch.float32, sequence_shards=1)
    batch = global_batch()
    parts = micro_batches(batch, 1, meshes.data_rank, meshes.sizes.data)
    losses.begin_step(meshes.fsdp.size() / batch["routed_tokens"].sum())
    with losses.counting():
        pipeline.losses(parts)
    losses.use(summed(losses.take_totals()))
    scale = meshes.fsdp.size() / (batch["labels"] != -100).sum()
    loss = torch.stack(pipeline.forward_backward(parts, scale)).sum() * scale / meshes.fsdp.size()
    report = losses.finish_step(summed(losses.take_totals()))
    masters = Masters(staged.parameters(), meshes.sizes.stage)
    staged.hand_over(masters)
    gradients = {
        name: masters.like(name, local.grad).full_tensor()
        for name, local in masters.local.items()
        if local.grad is not None
    }
    return gradients, loss, report.balance.item()


@pytest.mark.parametrize(("schedule", "checkpointing"), [soak("1f1b", "selective"), ("zbv", "none")])
def test_stages_of_a_pipeline_have_their_own_experts(schedule: str, checkpointing: Any) -> None:
    expected = reference("qwen3_moe", STRONG, **STAGED)
    found: dict[str, Tensor] = {}
    for gradients, _, balance in (ranks := run_ranks(4, pipelined, schedule, checkpointing)):
        found |= gradients
        assert balance == pytest.approx(float(expected.report.balance), rel=1e-6)
    error, name = worst_error(replace(expected, gradients=found), expected)
    assert error < 5e-6, name
    assert float(sum(loss for _, loss, _ in ranks)) == pytest.approx(expected.loss, rel=2e-6)


# bfloat16


def test_bfloat16_gradients_err_as_much_as_those_of_one_rank() -> None:
    exact = reference("qwen3_moe", PLAIN)
    alone = run_ranks(1, train, "qwen3_moe", over(micro_batch=2, compute="bfloat16"), PLAIN)[0][0]
    found = run_ranks(2, train, "qwen3_moe", over(shard=2, ep=2, compute="bfloat16"), PLAIN)[0][0]
    for name, gradient in exact.gradients.items():
        assert found.gradients[name].dtype == torch.float32
        error, bound = ((step.gradients[name] - gradient).norm() for step in (found, alone))
        assert error <= 2 * bound, name


# Faults that leave the loss as it is: the comparison above finds them


def divided_by_shards(model: Any) -> None:
    for experts in expert_modules(model).values():
        experts.set_gradient_divide_factor(2.0)


def weighted_twice(model: Any) -> None:
    """As if the routing weights were applied where the experts are and again where the tokens come from."""
    for experts in expert_modules(model).values():
        forward = experts.forward
        experts.forward = lambda hidden, chosen, weights, forward=forward: forward(hidden, chosen, weights * weights)


@pytest.mark.parametrize(("fault", "loss_shows_it"), [(divided_by_shards, False), soak(weighted_twice, True)])
def test_a_wrong_scale_of_experts_is_found(fault: Any, loss_shows_it: bool) -> None:
    layout = over(shard=4, ep=2, micro_batch=1)
    expected = reference("qwen3_moe", PLAIN)
    found = run_ranks(4, train, "qwen3_moe", layout, PLAIN, 1, False, fault)[0][0]
    assert worst_error(found, expected)[0] > 0.1
    assert (found.loss != pytest.approx(expected.loss, rel=1e-5)) == loss_shows_it
    if not loss_shows_it:
        expert = "model.layers.1.mlp.experts.down_proj"
        ratio = found.gradients[expert].norm() / expected.gradients[expert].norm()
        assert ratio == pytest.approx(2.0, rel=1e-4)
        assert found.squared_norm > 1.001 * expected.squared_norm


# Recomputation


def recomputed_order(kept: bool) -> tuple[list[list[int]], float]:
    """Row counts of every exchange of a step, and the gradients' error, with or without kept activations."""
    sizes: list[list[int]] = []
    read = expert_parallel.exchange_sizes

    def remembering(sent: Tensor, received: Tensor, pairs: int) -> tuple[list[int], list[int]]:
        sizes.append(read(sent, received, pairs)[0])
        return read(sent, received, pairs)

    expert_parallel.exchange_sizes = remembering
    layout = over(shard=2, ep=2, checkpointing="selective" if kept else "full")
    found = train("qwen3_moe", layout, PLAIN)[0]
    return sizes, worst_error(found, reference("qwen3_moe", PLAIN))[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_recomputed_block_repeats_its_exchange(kept: bool) -> None:
    for sizes, error in run_ranks(2, recomputed_order, kept):
        forward_and_again = [sizes[place : place + 4] for place in range(0, len(sizes), 4)]
        assert len(forward_and_again) == 2
        for first, second, again_second, again_first in forward_and_again:
            assert (first, second) == (again_first, again_second)
        assert error < 5e-6


# On a fake cluster


def rehearsed(checkpointing: str) -> tuple[list[int], list[str]]:
    """Forward and backward of rank 0 of 8 without numbers, but for what a layer reads on the host."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    exchanged = []

    def evenly(sent: Tensor, received: Tensor, pairs: int) -> tuple[list[int], list[int]]:
        exchanged.append(pairs)
        sizes = [pairs // len(sent)] * len(sent)
        return sizes, sizes

    expert_parallel.exchange_sizes = evenly
    built = build_model(RECIPE, PrecisionRecipe(), seed=3)
    layout = over(shard=4, tp=2, ep=4, checkpointing=checkpointing, compute="bfloat16")
    _, laid_out, *_ = divide(built.module, layout, Routing(balance=1.0, capacity=1.5))
    with FakeTensorMode(allow_non_fake_inputs=True):
        built.module.to_empty(device="cpu")
        batch = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("input_ids", "labels", "position_ids")}
        laid_out.begin_micro_batch(last=True)
        laid_out.backward(loss_sum(built.module, batch | {"routed_tokens": torch.ones(2, 8, dtype=torch.bool)}))
    missing = [name for name, parameter in laid_out.parameters().items() if parameter.grad is None]
    return exchanged, missing


@pytest.mark.parametrize(("checkpointing", "exchanges"), [("selective", 4), soak("none", 2)])
def test_a_fake_cluster_runs_the_same_program(checkpointing: str, exchanges: int) -> None:
    """16 tokens, of which each of two ranks of tp sends half, to two experts each."""
    exchanged, missing = run_ranks(1, rehearsed, checkpointing)[0]
    assert exchanged == [16] * exchanges
    assert not missing


# Checkpoints and filling


def save(folder: Path) -> dict[str, tuple[int, ...]]:
    run = lay_out(mixture("qwen3_moe"), over(shard=4, ep=2), PLAIN)
    dcp.save(dict(run.masters.whole), checkpoint_id=folder)
    return {name: tuple(shard.shape) for name, shard in run.masters.local.items()}


def load(folder: Path, layout: Layout) -> tuple[dict[str, Tensor], Step]:
    run = lay_out(mixture("qwen3_moe"), layout, PLAIN)
    with torch.no_grad():
        for shard in run.masters.local.values():
            shard.zero_()
    dcp.load(dict(run.masters.whole), checkpoint_id=folder)
    run.laid_out.masters_changed()
    whole = {name: parameter.full_tensor().detach() for name, parameter in run.masters.whole.items()}
    return whole, take_step(run, layout, PLAIN, 0)


def test_a_checkpoint_loads_in_any_layout(tmp_path: Path) -> None:
    shapes = run_ranks(4, save, tmp_path)
    assert {shape["model.layers.0.mlp.experts.gate_up_proj"] for shape in shapes} == {(2, 32, 32)}
    whole = dict(mixture("qwen3_moe").named_parameters())
    expected = reference("qwen3_moe", PLAIN)
    for layout in (over(shard=2), over(shard=2, ep=2)):
        loaded, step = run_ranks(layout.ranks, load, tmp_path, layout)[0]
        for name, parameter in whole.items():
            assert torch.equal(loaded[name], parameter), name
        same_as_one_process(step, expected)


RECIPE = ModelRecipe(
    class_name="Qwen3MoeForCausalLM",
    config=DENSE | {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
)


def fill(layout: Layout) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    built = build_model(RECIPE, PrecisionRecipe(), seed=3)
    _, laid_out, *_ = divide(built.module, layout, PLAIN)
    built.materialize(torch.device("cpu"))
    parameters = laid_out.parameters()
    return (
        {name: parameter.full_tensor().detach() for name, parameter in parameters.items()},
        {name: tuple(parameter.to_local().shape) for name, parameter in parameters.items()},
    )


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (over(shard=2, ep=2), (4, 32, 32)),
        (over(shard=4, ep=2), (2, 32, 32)),
        (over(shard=2, tp=2, ep=4), (2, 32, 32)),
    ],
)
def test_each_rank_is_filled_with_its_own_experts_alone(layout: Layout, shape: tuple[int, ...]) -> None:
    expected = build_model(RECIPE, PrecisionRecipe(), seed=3)
    expected.materialize(torch.device("cpu"))
    for whole, shapes in run_ranks(layout.ranks, fill, layout):
        assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == shape
        for name, parameter in expected.module.named_parameters():
            assert torch.equal(whole[name], parameter), name


def few_experts_over_many_ranks() -> tuple[Step, tuple[int, ...]]:
    layout = over(shard=4, ep=2, micro_batch=1)
    run = lay_out(mixture("mixtral", num_local_experts=2), layout, PLAIN)
    shape = run.masters.local["model.layers.0.mlp.experts.gate_up_proj"].shape
    return take_step(run, layout, PLAIN, 0), tuple(shape)


def test_more_ranks_than_experts_share_each_expert() -> None:
    """One expert a rank of ep, and two ranks for it: its rows are divided, where whole experts cannot be."""
    model = mixture("mixtral", num_local_experts=2)
    batch = global_batch()
    (loss_sum(model, batch) / (batch["labels"] != -100).sum()).backward()
    for step, shape in run_ranks(4, few_experts_over_many_ranks):
        assert shape == (1, 16, 32)
        for name, parameter in model.named_parameters():
            error = (step.gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert error < 5e-6, name


# Refusals


def test_what_cannot_be_split_is_refused_with_the_nearest_that_can() -> None:
    model = mixture("qwen3_moe")
    check_expert_parallel(model, ep=1, ranks=3)
    check_expert_parallel(model, ep=4, ranks=8)
    with pytest.raises(UserError, match=r"layout.ep = 6 must divide both the 8 experts .* the nearest that does is 4"):
        check_expert_parallel(model, ep=6, ranks=12)
    with pytest.raises(UserError, match=r"layout.ep = 8 .* and the 4 ranks .* the nearest that does is 4"):
        check_expert_parallel(model, ep=8, ranks=4)


def test_a_model_without_experts_is_refused() -> None:
    model = build_model(LANGUAGE["llama"], PrecisionRecipe(), seed=0).module
    check_expert_parallel(model, ep=1, ranks=2)
    with pytest.raises(UserError, match=r"LlamaForCausalLM has none: set layout.ep = 1"):
        check_expert_parallel(model, ep=2, ranks=2)
