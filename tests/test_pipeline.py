"""Pipelines compute what one process does, for every schedule and model class, alone and with what they go together."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from headway.errors import RunFailed
from headway.parallel import Masters
from headway.parallel.pipeline import SCHEDULES, StagedModel, check_gradients, plan_pipeline, split_into_stages
from pipelined_models import MicroBatch, loss_of, micro_batches, one_process, perturbed, predict
from pipelined_runs import SCALE, Case, assert_gradients_of_one_process, mesh_of, pipeline_of, staged_model, whole
from ranks import run_ranks


@pytest.mark.parametrize("name", ["llama", "qwen3_tied", "flux", "sd3", "wan"])
def test_every_schedule_gives_the_gradients_of_one_process(name: str) -> None:
    """Micro-batches differ in size and weight; nothing is divided by their number."""
    cases = [Case(schedule) for schedule in SCHEDULES]
    assert_gradients_of_one_process(perturbed(name), cases, micro_batches(name, 4, grow=1))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_5_vl", "qwen3_vl", "pixart", "sana"])
def test_other_model_classes_give_the_gradients_of_one_process(name: str) -> None:
    assert_gradients_of_one_process(perturbed(name), [Case("1f1b"), Case("zbv")], micro_batches(name, 4, grow=1))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama_tied", "interleaved_zero_bubble"),
        ("qwen3_moe", "dualpipev"),
        ("flux", "zbv"),
        ("sd3", "interleaved_1f1b"),
        ("wan", "1f1b"),
    ],
)
def test_stages_can_be_sharded_and_recomputed(name: str, schedule: str) -> None:
    """Two ranks of the pipeline, two data-parallel ranks each."""
    case = Case(schedule, checkpointing="full", sharded=True)
    assert_gradients_of_one_process(perturbed(name), [case], micro_batches(name, 8, grow=1), data_ranks=2)


def test_four_ranks_with_uneven_cuts() -> None:
    cases = [Case("1f1b", cuts=(1, 3, 1, 1))]
    assert_gradients_of_one_process(perturbed("deep_flux"), cases, micro_batches("deep_flux", 5), pp=4)


def test_several_stages_a_rank_with_uneven_cuts() -> None:
    cases = [
        Case("zbv", cuts=(1, 2, 1, 2)),
        Case("interleaved_zero_bubble", cuts=(1, 1, 1, 1, 1, 1)),
        Case("interleaved_1f1b", cuts=(3, 1, 1, 1), checkpointing="selective"),
    ]
    assert_gradients_of_one_process(perturbed("deep_flux"), cases, micro_batches("deep_flux", 4))


def test_a_frozen_first_stage_sends_no_gradient_back() -> None:
    model = perturbed("llama")
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[2, 3]), model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    cases = [Case("1f1b", cuts=(2, 2)), Case("zbv", cuts=(1, 1, 1, 1)), Case("dualpipev", sharded=True)]
    batches = micro_batches("llama", 4, grow=1)
    _, expected = one_process(model, batches, SCALE)
    assert len(expected) == 4
    ranks = run_ranks(2, lora_gradients, model, cases, batches)
    for number, case in enumerate(cases):
        found = {name: gradient for rank in ranks for name, gradient in rank[number].items()}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-6, atol=1e-7, msg=f"{case}: {name}")


def lora_gradients(model: nn.Module, cases: list[Case], batches: list[MicroBatch]) -> list[dict[str, torch.Tensor]]:
    results = []
    for case in cases:
        staged = staged_model(model, case, mesh_of(1), len(batches))
        if case.schedule == "1f1b" and dist.get_rank() == 1:
            assert not staged.split.stages[0].gradients_in
        pipeline_of(staged, case).forward_backward(batches, SCALE)
        results.append({name: whole(parameter.grad) for name, parameter in staged.parameters().items()})
    return results


def test_bfloat16_is_as_close_to_float32_as_without_stages() -> None:
    """Float32 masters and reduction. The bound is twice the error of plain bfloat16."""
    model, batches = perturbed("llama_tied"), micro_batches("llama_tied", 4)
    _, exact = one_process(model, batches, SCALE)
    half = copy.deepcopy(model).bfloat16()
    _, rounded = one_process(half, batches, SCALE)

    def error(found: dict[str, torch.Tensor]) -> float:
        return max(float((found[name].float() - exact[name]).norm() / exact[name].norm()) for name in exact)

    for schedule in ("1f1b", "zbv"):
        case = Case(schedule, sharded=True, compute=torch.bfloat16)
        parts = run_ranks(2, one_step, model, case, batches)
        found = {name: gradient for part in parts for name, gradient in part.items()}
        assert error(found) <= 2 * error(rounded)


def one_step(model: nn.Module, case: Case, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    staged = staged_model(model, case, mesh_of(1), len(batches))
    pipeline_of(staged, case).forward_backward(batches, SCALE)
    return {name: whole(parameter.grad) for name, parameter in staged.parameters().items()}


STEPS: list[dict[str, int]] = [{"seed": 1, "grow": 0}, {"seed": 2, "grow": 3}, {"seed": 3, "grow": 0}]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_steps_of_other_lengths_train_as_one_process_does(schedule: str) -> None:
    """An embedding tied to the head is one weight: it is counted once in the norm, and both places stay equal."""
    model = perturbed("qwen3_tied")
    case = Case(schedule, sharded=True)
    ranks = run_ranks(4, train, model, case)
    trained = copy.deepcopy(model)
    norms = []
    for step in STEPS:
        _, found = one_process(trained, micro_batches("qwen3_tied", 8, **step), SCALE)
        norms.append(sum(float(gradient.square().sum()) for gradient in found.values()))
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                parameter -= 0.01 * found[name]
    told = [sum(shares) for shares in zip(*(rank["norm_shares"] for rank in ranks), strict=True)]
    assert told == pytest.approx(norms, rel=1e-5)
    names = [name for rank in ranks[::2] for name in rank["weights"]]
    assert sorted(names) == sorted(name for name, _ in trained.named_parameters())
    for rank in ranks:
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, trained.get_parameter(name), rtol=1e-5, atol=1e-6)
    embedding = next(rank["embedding"] for rank in ranks if rank["embedding"] is not None)
    head = next(rank["head"] for rank in ranks if rank["head"] is not None)
    assert torch.equal(embedding, head)


def train(model: nn.Module, case: Case) -> dict[str, Any]:
    """Plain gradient descent on two data-parallel ranks."""
    mesh = mesh_of(2)
    staged = staged_model(model, case, mesh, 4)
    masters = Masters(staged.parameters(), 2)
    pipeline = pipeline_of(staged, case)
    shares = []
    for step in STEPS:
        mine = micro_batches("qwen3_tied", 8, **step)[mesh["dp"].get_local_rank() :: 2]
        pipeline.forward_backward(mine, SCALE * 2)
        staged.hand_over(masters)
        shares.append(float(masters.squared_norm_share()))
        with torch.no_grad():
            for weight in masters.local.values():
                weight -= 0.01 * weight.grad
        staged.masters_changed()
    ends = {stage.index: dict(stage.module.named_parameters()) for stage in staged.split.stages}
    last = max(ends)
    return {
        "norm_shares": shares,
        "weights": {name: whole(weight) for name, weight in masters.whole.items()},
        "embedding": whole(ends[0]["model.embed_tokens.weight"]) if 0 in ends else None,
        "head": whole(ends[last]["lm_head.weight"]) if "lm_head.weight" in ends[last] else None,
    }


@pytest.mark.parametrize("name", ["qwen3_tied", "wan"])
def test_outputs_without_gradients_are_those_of_one_process(name: str) -> None:
    """Of any number of micro-batches, between two training steps, on all ranks."""
    model = perturbed(name)
    cases = [Case("1f1b"), Case("dualpipev", sharded=True)]
    for outputs, losses, found in run_ranks(2, outputs_and_losses, model, name, cases):
        batches = micro_batches(name, 3, grow=1)
        for output, batch in zip(outputs, batches, strict=True):
            torch.testing.assert_close(output, predict(model, batch).detach(), rtol=1e-5, atol=1e-5)
        expected = [float(loss_of(predict(model, batch), batch).detach()) for batch in batches]
        assert losses in ([0.0] * 3, pytest.approx(expected, rel=1e-5))
        assert found


def outputs_and_losses(model: nn.Module, name: str, cases: list[Case]) -> tuple[list[torch.Tensor], list[float], bool]:
    batches = micro_batches(name, 3, grow=1)
    for case in cases:
        staged = staged_model(model, case, mesh_of(1), 4)
        pipeline = pipeline_of(staged, case)
        pipeline.forward_backward(micro_batches(name, 4), SCALE)
        before = {n: whole(p.grad).clone() for n, p in staged.parameters().items()}
        staged.train(False)
        outputs = pipeline.everywhere(pipeline.forward(batches))
        losses = [float(loss) for loss in pipeline.losses(batches)]
        staged.train(True)
        for parameter in staged.parameters().values():
            parameter.grad = None
        pipeline.forward_backward(micro_batches(name, 4), SCALE)
        same = all(torch.equal(before[n], whole(p.grad)) for n, p in staged.parameters().items())
    return outputs, losses, same


def test_weights_without_gradients_are_told() -> None:
    """Blocks freed after forward lose gradients under schedules that split the backward: what planning refuses."""
    with pytest.raises(AssertionError, match=r"trained parameters got no gradient \(model\.layers\.3"):
        run_ranks(2, step_with_freed_blocks, perturbed("llama"))


def step_with_freed_blocks(model: nn.Module) -> None:
    case = Case("zbv")
    plan = plan_pipeline(case.layout(2), model, micro_batches=4, compiled=False)
    split = split_into_stages(model, plan, dist.get_rank())
    mesh = mesh_of(1)
    for stage in split.stages:
        for _, block in stage.own(f"model.layers.{number}" for number in range(4)):
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(stage.module, mesh=mesh["dp"])
    staged = StagedModel(split, mesh["pp"].get_group())
    pipeline_of(staged, case).forward_backward(micro_batches("llama", 4), SCALE)
    if dist.get_rank() == 0:
        check_gradients(staged.parameters())


def test_check_gradients_names_the_first_without_one() -> None:
    with_gradient, without = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    with_gradient.grad = torch.ones(1)
    check_gradients({"a": with_gradient})
    with pytest.raises(RunFailed, match=r"1 of 2 trained parameters got no gradient \(b, "):
        check_gradients({"a": with_gradient, "b": without})
