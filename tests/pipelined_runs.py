"""Stages on real ranks: what a step of a pipeline leaves, to be compared with what one process computes."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.models.build import repeated_blocks
from headway.parallel import checkpoint_activations
from headway.parallel.pipeline import (
    Pipeline,
    StagedModel,
    check_gradients,
    plan_pipeline,
    reshards_after_forward,
    split_into_stages,
)
from headway.recipe import LayoutRecipe
from pipelined_models import MicroBatch, loss_of, one_process, predict
from ranks import run_ranks

SCALE = 0.1


@dataclass(frozen=True)
class Case:
    """A pipeline."""

    schedule: str
    cuts: tuple[int, ...] | None = None
    checkpointing: Literal["none", "full", "selective"] = "none"
    sharded: bool = False
    """By FSDP2, also where there is one data-parallel rank."""
    compute: torch.dtype = torch.float32

    def layout(self, pp: int) -> LayoutRecipe:
        if self.cuts is None:
            return LayoutRecipe(pp=pp, pp_schedule=self.schedule)
        stages = len(self.cuts) // pp
        return LayoutRecipe(pp=pp, pp_schedule=self.schedule, pp_stages_per_rank=stages, pp_cuts=list(self.cuts))


def mesh_of(data_ranks: int) -> DeviceMesh:
    shape = (dist.get_world_size() // data_ranks, data_ranks)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))


def staged_model(model: nn.Module, case: Case, mesh: DeviceMesh, micro_batches: int) -> StagedModel:
    """This rank's stages of ``model``, which is filled."""
    layout = case.layout(mesh["pp"].size())
    plan = plan_pipeline(layout, model, micro_batches=micro_batches, compiled=False)
    split = split_into_stages(model, plan, mesh["pp"].get_local_rank())
    policy = MixedPrecisionPolicy(case.compute, torch.float32, cast_forward_inputs=False)
    for stage in split.stages:
        blocks = [block for _, block in stage.own(path for path, _ in repeated_blocks(model))]
        checkpoint_activations(blocks, case.checkpointing)
        if case.sharded:
            for block in blocks:
                reshard = reshards_after_forward(layout)
                fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(stage.module, mesh=mesh["dp"], mp_policy=policy)
    return StagedModel(split, mesh["pp"].get_group())


def pipeline_of(staged: StagedModel, case: Case) -> Pipeline:
    return Pipeline(staged, predict, loss_of, device=torch.device("cpu"), dtype=case.compute)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gradients(model: nn.Module, cases: list[Case], data_ranks: int, batches: list[MicroBatch]) -> list[Any]:
    """For each case (losses, gradients by name) on this rank, whose data rank takes every ``data_ranks``-th batch."""
    mesh = mesh_of(data_ranks)
    mine = batches[mesh["dp"].get_local_rank() :: data_ranks]
    results = []
    for case in cases:
        staged = staged_model(model, case, mesh, len(mine))
        losses = pipeline_of(staged, case).forward_backward(mine, SCALE * data_ranks)
        check_gradients(staged.parameters())
        for parameter in staged.parameters().values():
            if case.sharded:
                assert parameter.grad.placements == parameter.placements
        found = {name: whole(parameter.grad) for name, parameter in staged.parameters().items()}
        results.append(([float(loss) for loss in losses], found))
    return results


def assert_gradients_of_one_process(
    model: nn.Module,
    cases: list[Case],
    batches: list[MicroBatch],
    *,
    pp: int = 2,
    data_ranks: int = 1,
    bound: float = 2e-6,
) -> None:
    """Every parameter's gradient and every loss, in each case."""
    losses, expected = one_process(model, batches, SCALE)
    ranks = run_ranks(pp * data_ranks, gradients, model, cases, data_ranks, batches)
    for number, case in enumerate(cases):
        told: dict[str, Tensor] = {}
        for rank, results in enumerate(ranks):
            if rank % data_ranks == 0:
                assert not told.keys() & results[number][1].keys(), f"{case}: two stages train the same"
                told |= results[number][1]
        assert told.keys() == expected.keys(), case
        for name, gradient in expected.items():
            error = (told[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6)
            assert error <= bound, f"{case}: {name}: {error:.1e}"
        for place in range(data_ranks):
            sums = [sum(parts) for parts in zip(*(r[number][0] for r in ranks[place::data_ranks]), strict=True)]
            torch.testing.assert_close(sums, losses[place::data_ranks], rtol=1e-5, atol=0.0)
