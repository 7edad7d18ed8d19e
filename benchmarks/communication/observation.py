"""What a rank of a real run sends in a step, and the facts that the formulas need besides the recipe."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from communication.formulas import Shape
from communication.recorder import Recorder, axes_of
from communication.traffic import Traffic
from headway.models import find_routers
from headway.parallel import Ranks
from headway.parallel.pipeline import Pipeline
from headway.recipe import Recipe, Sizes
from headway.train import Assembly, Trainer, assemble, training_loader
from headway.train.passes import PipelinedPasses


@dataclass
class Observation:
    """Of one rank, in one step."""

    rank: int
    sizes: Sizes
    traffic: Traffic
    blocks: list[list[Shape]]
    """Shapes of the parameters of each block that this rank shares in, as tensor parallelism leaves them."""
    root: list[Shape]
    """Of all other parameters."""
    rank_of_stage: tuple[int, ...] = (0,)
    """The rank of the pipeline that has each stage."""
    rows: Counter[int] = field(default_factory=Counter)
    """Rows of tokens that this rank sends to each rank of ep, itself among them."""


def trainer_of(recipe: Recipe) -> Trainer:
    """The Trainer of this rank, as ``headway train`` assembles it."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return Trainer(recipe, assemble(recipe, ranks, recipe.run.directory), lambda: False, lambda kind, **fields: None)


@contextmanager
def a_group_for_each_axis() -> Iterator[None]:
    """torch gives every axis that goes over all ranks the same process group: within, each gets its own.

    So what is sent on one can be told from what is sent on another, on two ranks too.
    """
    with patch("torch.distributed.device_mesh.get_world_size", lambda: 2**31):
        yield


def observe(recipe: Recipe) -> Observation:
    """Two steps of ``recipe`` on this rank; the second one, when everything is set up, is observed."""
    with a_group_for_each_axis():
        trainer = trainer_of(recipe)
    trainer.parts.flops = lambda tensors: None  # counted on a copy on meta, which takes long and sends nothing
    first, second = training_loader(trainer.recipe, trainer.parts, range(2))
    trainer.step(first)
    rows: Counter[int] = Counter()
    watch_routers(trainer.parts, rows)
    with Recorder(axes_of(trainer.parts.meshes)) as recorder:
        trainer.step(second)
    return Observation(
        rank=dist.get_rank(),
        sizes=trainer.parts.meshes.sizes,
        traffic=recorder.traffic,
        rank_of_stage=ranks_of_stages(trainer.parts),
        rows=rows,
        **parameter_shapes(trainer.parts),
    )


def parameter_shapes(parts: Assembly) -> dict[str, Any]:
    """``blocks`` and ``root`` of an Observation. Parameters of experts that ep divides are left out."""
    names = [name for name, _ in parts.built.blocks]
    units: dict[str, list[Shape]] = {}
    for name, parameter in parts.masters.whole.items():
        if parts.meshes.sizes.ep == 1 or ".experts." not in name:
            owner = next((block for block in names if name.startswith(f"{block}.")), "")
            units.setdefault(owner, []).append(_divided_over_tp(parameter))
    return {"blocks": [units[name] for name in names if name in units], "root": units.get("", [])}


def _divided_over_tp(parameter: DTensor) -> Shape:
    shape = list(parameter.shape)
    mesh = parameter.device_mesh
    for name, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
        if name == "tp" and placement.is_shard():
            dimension = placement.dim  # type: ignore[attr-defined]
            shape[dimension] //= mesh["tp"].size()
    return tuple(shape)


def ranks_of_stages(parts: Assembly) -> tuple[int, ...]:
    """The rank of the pipeline that has each stage."""
    if parts.layout.staged is None:
        return (0,)
    plan = parts.layout.staged.split.plan
    return tuple(plan.rank_of(stage) for stage in range(plan.stages))


def pipeline_of(parts: Assembly) -> Pipeline:
    """That of a layout with one."""
    assert isinstance(parts.passes, PipelinedPasses)
    return parts.passes.pipeline


def watch_routers(parts: Assembly, rows: Counter[int]) -> None:
    """Let ``rows`` count the pairs of token and expert that the routers of this rank send to each rank of ep."""
    meshes, model = parts.meshes, parts.built.components[0].module
    modules: dict[str, Any] = dict(model.named_modules())
    tp, ep = meshes.sizes.tp, meshes.sizes.ep

    def count(experts_of_a_rank: int, router: Any, arguments: Any, result: Any) -> None:
        _, _, chosen = result
        own = chosen.tensor_split(tp)[meshes.tp.get_local_rank()]  # ranks of tp share the tokens out
        rows.update((own // experts_of_a_rank).flatten().tolist())

    for router in find_routers(model):
        modules[router.name].register_forward_hook(functools.partial(count, router.experts // ep))
