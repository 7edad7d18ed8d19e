"""Stages are copies of the model with its names, without what other stages own, and say what travels between them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from headway.parallel.pipeline import PipelinePlan, Split, StandIn, split_into_stages
from headway.parallel.pipeline.recipe import Edge
from headway.parallel.pipeline.stage_runner import TensorShape, on_this_rank
from pipelined_models import MODELS, micro_batches, predict

TIED = {"llama_tied", "qwen3_tied"}


def on_meta(name: str) -> nn.Module:
    model: Any = MODELS[name][0]().to("meta")
    if name in TIED:
        model.tie_weights()
    return model


def splits(name: str, schedule: str = "zbv", ranks: int = 2) -> tuple[nn.Module, list[Split]]:
    model = on_meta(name)
    stages = ranks * (1 if schedule == "1f1b" else 2)
    blocks = 6 if name == "deep_flux" else 4
    cuts = (1,) * (stages - 1) + (blocks - stages + 1,)
    plan = PipelinePlan(schedule, ranks, cuts)
    return model, [split_into_stages(model, plan, rank) for rank in range(ranks)]


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_is_on_one_stage_under_its_own_name(name: str) -> None:
    model, ranks = splits(name)
    stages = sorted((stage for split in ranks for stage in split.stages), key=lambda stage: stage.index)
    assert [stage.index for stage in stages] == [0, 1, 2, 3]
    copies = {shared.user_name for shared in ranks[0].shared}
    assert copies == ({"lm_head.weight"} if name in TIED else set())
    shapes = {n: p.shape for n, p in model.named_parameters()}
    found = [(n, p.shape) for stage in stages for n, p in stage.module.named_parameters() if n not in copies]
    assert dict(found) == shapes
    assert len(found) == len(shapes)
    for stage in stages:
        for child in stage.module.modules():
            if isinstance(child, StandIn):
                assert not list(child.parameters())
                assert not list(child.buffers())
    assert not any(isinstance(child, StandIn) for child in model.modules())


@pytest.mark.parametrize("name", ["llama", "deep_flux"])
def test_own_leaves_out_what_other_stages_have(name: str) -> None:
    _, (first, second) = splits(name, "1f1b")
    lists = {"llama": ["model.layers"], "deep_flux": ["transformer.transformer_blocks"]}[name]
    paths = [f"{path}.{number}" for path in lists for number in range(2)]
    assert [path for path, _ in first.stages[0].own(paths)] == paths[:1]
    assert [path for path, _ in second.stages[0].own(paths)] == paths[1:]
    assert second.stages[0].own([f"{paths[0]}.nowhere"]) == []


@pytest.mark.parametrize("name", MODELS)
def test_what_travels_is_known_from_the_micro_batch_alone(name: str) -> None:
    """The stage before and the stage behind agree on it; tests on ranks show that it is what is sent."""
    _, ranks = splits(name, "1f1b")
    small, large = micro_batches(name, 2, grow=1)
    for batch in (small, large):
        edges = [split.edges(predict, batch) for split in ranks]
        assert edges[0] == edges[1]
        assert len(edges[0]) == len(ranks[0].stages[0].travels)
    assert ranks[0].edges(predict, small) != ranks[0].edges(predict, large)


def test_tokens_are_divided_where_sequences_are_split_over_ranks() -> None:
    edges = (Edge((2, 7, 8), tokens=1), Edge((2, 7)))
    assert on_this_rank(edges, torch.bfloat16, 2) == (
        TensorShape((2, 4, 8), torch.bfloat16),
        TensorShape((2, 7), torch.bfloat16),
    )


def test_gradients_go_back_only_as_far_as_something_trains() -> None:
    model = on_meta("llama")
    model.requires_grad_(False)
    layers: Any = model.get_submodule("model.layers")
    layers[1].requires_grad_(True)
    layers[3].requires_grad_(True)
    plan = PipelinePlan("zbv", 2, (1, 1, 1, 1))
    stages = [stage for rank in range(2) for stage in split_into_stages(model, plan, rank).stages]
    found = {stage.index: (stage.gradients_in, stage.gradients_out) for stage in stages}
    assert found == {0: (False, False), 1: (False, True), 2: (True, True), 3: (True, True)}


def test_a_stage_is_filled_by_name() -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3_tied"][0]()
    plan = PipelinePlan("1f1b", 2, (1, 3))
    for rank in range(2):
        (stage,) = split_into_stages(copy.deepcopy(model).to("meta"), plan, rank).stages
        module = stage.module.to_empty(device="cpu")
        assert module.load_state_dict(model.state_dict(), strict=False).missing_keys == []


def test_a_wrapper_that_never_calls_its_model_is_a_programming_error() -> None:
    _, (first, _) = splits("llama", "1f1b")
    with pytest.raises(TypeError, match="without having called the model"):
        first.edges(lambda model, batch: torch.zeros(1), micro_batches("llama", 1)[0])
