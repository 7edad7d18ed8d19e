"""The routers' losses are over the global batch, whatever ranks, micro-batches and recomputation make of it."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from headway.errors import UserError
from headway.models.router_losses import RouterLosses
from headway.models.routers import check_routers, find_routers, own_balance_coefficient, within_capacity
from mixtures import (
    CHOSEN,
    EXPERTS,
    LAYERS,
    Layout,
    Routing,
    Step,
    global_batch,
    lay_out,
    loss_sum,
    mixture,
    over,
    reference,
    take_step,
    train,
    worst_error,
)
from ranks import run_ranks

STRONG = Routing(balance=1.0, z=0.01, exact=True)
"""Coefficients that make the losses' gradients as large as the model's."""

LAYOUTS = {
    "1 rank, 1 micro-batch": over(micro_batch=8),
    "1 rank, full recomputation": over(micro_batch=2, checkpointing="full"),
    "1 rank, selective recomputation": over(micro_batch=2, checkpointing="selective"),
    "2 replicas": over(dp_replicate=2),
    "ep2, full recomputation": over(shard=2, ep=2, checkpointing="full"),
    "ep4, of 2 x tp2": over(shard=2, tp=2, ep=4),
    "cp2": over(cp=2),
    "ep2, experts sharded over 2": over(shard=4, ep=2, micro_batch=1),
}


def assert_same(found: Step, expected: Step) -> None:
    error, name = worst_error(found, expected)
    assert error < 5e-6, name
    assert found.loss == pytest.approx(expected.loss, rel=2e-6)
    assert found.squared_norm == pytest.approx(expected.squared_norm, rel=1e-5)
    for field, values in vars(expected.report).items():
        assert vars(found.report)[field].tolist() == pytest.approx(values.tolist(), rel=1e-5), field


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_report_are_those_of_the_whole_batch(name: str) -> None:
    layout = LAYOUTS[name]
    expected = reference("mixtral", STRONG)
    without = reference("mixtral", Routing())
    assert worst_error(without, expected)[0] > 0.5
    for rank in run_ranks(layout.ranks, train, "mixtral", layout, STRONG):
        assert_same(rank[0], expected)


def given_fractions(layout: Layout, routing: Routing, fractions: Tensor) -> Step:
    run = lay_out(mixture("qwen3_moe"), layout, routing)
    run.losses.load_state_dict({"fractions": fractions})
    return take_step(run, layout, routing, 0)


@pytest.mark.parametrize("layout", [over(micro_batch=2), over(shard=2, ep=2, checkpointing="full")])
def test_fractions_of_another_step_take_the_place_of_this_ones(layout: Layout) -> None:
    fractions = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(4))
    routing = Routing(balance=1.0)
    expected = reference("qwen3_moe", routing, fractions)
    for step in run_ranks(layout.ranks, given_fractions, layout, routing, fractions):
        assert_same(step, expected)


@pytest.mark.parametrize("exact", [True, False])
def test_training_is_the_same_on_any_ranks_and_micro_batches(exact: bool) -> None:
    routing = Routing(balance=0.1, z=0.001, exact=exact)
    layouts = (
        over(micro_batch=8),
        over(micro_batch=1),
        over(shard=2, micro_batch=4),
        over(shard=2, ep=2, micro_batch=2),
    )
    runs = [run_ranks(layout.ranks, train, "mixtral", layout, routing, 3)[0] for layout in layouts]
    for found in runs[1:]:
        for step, expected in zip(found, runs[0], strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=1e-5)
            assert float(step.report.balance) == pytest.approx(float(expected.report.balance), rel=1e-5)
            assert step.squared_norm == pytest.approx(expected.squared_norm, rel=1e-4)


def test_the_step_before_balances_from_the_second_step_on() -> None:
    """All tokens begin on two experts, and nothing but the balance loss trains."""
    model = mixture("mixtral", crowded=True)
    losses = watched(model, balance=1.0)
    found = []
    for number in range(12):
        batch = global_batch(number)
        losses.begin_step(1 / batch["routed_tokens"].sum())
        (0 * loss_sum(model, batch)).backward()
        found.append(losses.finish_step(losses.take_totals()).balance.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    assert found[0] > 0.9 * EXPERTS
    assert found[-1] < 0.5 * EXPERTS


def of_each_rank() -> Step:
    """The fault: f of what each rank counts."""
    layout, routing = over(shard=2), Routing(balance=1.0)
    run = lay_out(mixture("mixtral"), layout, routing)
    with run.losses.counting(), torch.no_grad():
        loss_sum(run.model, {name: tensor[dist.get_rank() :: 2] for name, tensor in global_batch().items()})
    run.losses.use(run.losses.take_totals())
    return take_step(run, layout, routing, 0)


def test_a_loss_per_rank_is_found() -> None:
    found = run_ranks(2, of_each_rank)[0]
    expected = reference("mixtral", Routing(balance=1.0))
    assert found.loss == pytest.approx(expected.loss, rel=2e-6)
    assert worst_error(found, expected)[0] > 0.01


def test_the_value_is_that_of_transformers_for_one_layer() -> None:
    model = mixture("mixtral", num_hidden_layers=1)
    losses = watched(model, balance=0.0)
    batch = global_batch()
    logits = model(input_ids=batch["input_ids"], output_router_logits=True, routed_tokens=batch["routed_tokens"])
    logits.logits.sum().backward()
    report = losses.finish_step(losses.take_totals())
    theirs = load_balancing_loss_func(logits.router_logits, EXPERTS, CHOSEN, batch["routed_tokens"])
    assert float(report.balance) == pytest.approx(theirs.item(), rel=1e-6)
    assert own_balance_coefficient(model) == model.config.router_aux_loss_coef > 0


def watched(model: Any, **asked: Any) -> RouterLosses:
    losses = RouterLosses(find_routers(model), torch.device("cpu"), **asked)
    losses.attach(model, model.model.layers)
    return losses


def test_no_gradient_flows_and_nothing_is_counted_without_a_backward_pass() -> None:
    model = mixture("qwen3_moe")
    losses = watched(model, balance=1.0)
    with torch.no_grad():
        loss_sum(model, global_batch())
    assert not losses.take_totals().any()
    loss_sum(model, global_batch())
    assert not losses.take_totals().any()


def test_tokens_that_do_not_reach_a_block_are_an_error() -> None:
    model = mixture("qwen3_moe")
    watched(model, balance=1.0)
    with pytest.raises(RuntimeError, match="routed_tokens did not reach"):
        model(input_ids=global_batch()["input_ids"])


def test_a_batch_without_tokens_that_count_gives_zeros() -> None:
    model = mixture("qwen3_moe")
    losses = watched(model, balance=1.0, z=1.0)
    batch = global_batch()
    losses.begin_step(torch.ones(()))
    loss_sum(model, batch | {"routed_tokens": torch.zeros_like(batch["routed_tokens"])}).backward()
    report = losses.finish_step(losses.take_totals())
    assert report.balance == report.z == 0
    assert torch.isfinite(losses.fractions).all()
    alone = mixture("qwen3_moe")
    loss_sum(alone, batch).backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_a_model_cut_into_stages_averages_over_all_layers() -> None:
    """Of three layers a stage has one: its router's gradient is a third, and the report has its row."""
    whole = mixture("mixtral", num_hidden_layers=3)
    routers = find_routers(whole)
    assert [router.name for router in routers] == [f"model.layers.{n}.mlp.gate" for n in range(3)]
    stage = mixture("mixtral", num_hidden_layers=3)

    class Passed(nn.Module):
        def forward(self, hidden: Tensor, **keywords: Any) -> Tensor:
            return hidden

    stage.model.layers[0], stage.model.layers[2] = Passed(), Passed()
    losses = RouterLosses(routers, torch.device("cpu"), balance=1.0)
    losses.attach(stage, stage.model.layers)
    loss_sum(stage, global_batch()).backward()
    totals = losses.take_totals()
    assert totals.any(1).tolist() == [False, True, False]


# Capacity


def brute_force(weights: Tensor, chosen: Tensor, tokens: Tensor, experts: int, factor: float) -> Tensor:
    batch, length = tokens.shape
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for sequence in range(batch):
        rows = [sequence * length + place for place in range(length) if tokens[sequence, place]]
        limit = math.ceil(factor * chosen.shape[1] * len(rows) / experts - 1e-9)
        for expert in range(experts):
            pairs = [(row, slot) for row in rows for slot in range(chosen.shape[1]) if chosen[row, slot] == expert]
            for row, slot in sorted(pairs, key=lambda pair: -weights[pair].item())[:limit]:
                kept[row, slot] = True
    return kept


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 9),
    experts=st.integers(1, 6),
    per_token=st.integers(1, 3),
    factor=st.sampled_from([0.25, 0.5, 1.0, 1.25, 8.0]),
    levels=st.integers(1, 50),
    seed=st.integers(0, 999),
)
def test_the_heaviest_pairs_of_each_sequence_are_kept(
    batch: int, length: int, experts: int, per_token: int, factor: float, levels: int, seed: int
) -> None:
    per_token = min(per_token, experts)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(batch * length, experts, generator=generator).topk(per_token).indices
    weights = torch.randint(0, levels, chosen.shape, generator=generator) / levels
    tokens = torch.rand(batch, length, generator=generator) < 0.7
    kept = within_capacity(weights, chosen, tokens, experts, factor)
    assert torch.equal(kept, brute_force(weights, chosen, tokens, experts, factor))


def limited_reference(factor: float) -> dict[str, Tensor]:
    """One process; what is over capacity gets a weight of zero in front of the library's own experts."""
    model = mixture("mixtral")
    batch = global_batch()
    for layer in model.model.layers:

        def limited(hidden: Tensor, forward: Any = layer.mlp.gate.forward) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = forward(hidden)
            kept = brute_force(weights, chosen, batch["routed_tokens"], EXPERTS, factor)
            return logits, weights * kept, chosen

        layer.mlp.gate.forward = limited
    (loss_sum(model, batch) / (batch["labels"] != -100).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "layout",
    [
        over(micro_batch=4, checkpointing="full"),
        over(shard=2, ep=2, micro_batch=1, checkpointing="selective"),
        over(shard=2, tp=2, ep=2),
    ],
)
def test_what_is_dropped_does_not_depend_on_the_layout(layout: Layout) -> None:
    expected = limited_reference(0.75)
    for rank in run_ranks(layout.ranks, train, "mixtral", layout, Routing(capacity=0.75)):
        assert 0.1 < float(rank[0].report.dropped.mean()) < 0.6
        for name, gradient in expected.items():
            error = (rank[0].gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error < 5e-6, name


def test_a_capacity_that_is_never_reached_changes_nothing() -> None:
    layout, loose = over(shard=2, ep=2), Routing(capacity=8.0)
    step = run_ranks(2, train, "mixtral", layout, loose)[0][0]
    assert step.report.dropped.tolist() == [0, 0]
    assert worst_error(step, reference("mixtral", Routing()))[0] < 5e-6


def test_capacity_needs_experts_and_whole_sequences() -> None:
    model = mixture("mixtral")
    check_routers(model, find_routers(model), capacity=1.0, cp=1)
    with pytest.raises(UserError, match=r"layout.cp = 2 splits sequences: set layout.cp = 1"):
        check_routers(model, find_routers(model), capacity=1.0, cp=2)
    with pytest.raises(UserError, match="Linear has no routers"):
        check_routers(nn.Linear(2, 2), [], capacity=None, cp=1)
