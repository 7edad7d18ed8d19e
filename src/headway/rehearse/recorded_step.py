"""One step of a Trainer under a Recorder, on fake or on real ranks, and the Record that it makes."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from headway.data import Batch
from headway.parallel import Meshes
from headway.recipe import Recipe
from headway.rehearse.collectives import Groups
from headway.rehearse.patches import recording
from headway.rehearse.record import Facts, Operator, Record
from headway.rehearse.recorder import Recorder, Run
from headway.rehearse.step_sizes import StepSizes
from headway.rehearse.streams import Device
from headway.rehearse.whereabouts import Whereabouts
from headway.train.assembly import StepParts
from headway.train.flops import Flops
from headway.train.optimizers import shard_states
from headway.train.trainer import Trainer

ReadOnHost = Callable[[Tensor], list[float]]


def record_step(
    recipe: Recipe,
    parts: StepParts,
    batches: list[Batch],
    device: Device,
    sizes: StepSizes,
    read_on_host: ReadOnHost,
    run: Callable[[Whereabouts], Run] | None = None,
    before: Callable[[Recorder], None] = lambda recorder: None,
) -> Record:
    """Take a step with ``batches``, optimizer states being there, and write it down.

    ``parts`` must have been assembled within ``patches.recorded_streams(device)``. ``run`` computes operators; None:
    they run as they are. ``before`` is called when the recorder knows what is in memory.
    """
    where = _whereabouts(parts)
    groups = Groups.of(_meshes(parts.meshes))
    recorder = Recorder(where, device, groups) if run is None else Recorder(where, device, groups, run(where))
    states = [pair for optimizer in parts.optimizers for pair in shard_states(optimizer)]
    parts.flops = lambda tensors: Flops(0, 0, 0)
    _name_what_is_there(recorder, parts, states, batches)
    del states
    before(recorder)

    def read(values: Tensor) -> list[float]:
        recorder.host_reads_device("step")
        with recorder.silence():
            return read_on_host(values)

    trainer = Trainer(recipe, parts, lambda: False, lambda *_, **__: None, read_on_host=read)
    trainer.on_gradients = lambda masters: _name_gradients(recorder, parts)
    with recording(recorder), recorder:
        trainer.step(batches)
        end = len(recorder.operators)
    assert end
    return Record(
        facts=_facts(recipe, parts, sizes, len(batches), recorder.operators),
        operators=recorder.operators,
        allocations=recorder.allocations(),
        groups=groups.known,
        host_reads=recorder.host_reads,
        actions=recorder.actions,
        segments=recorder.segments,
    )


def _whereabouts(parts: StepParts) -> Whereabouts:
    return Whereabouts(_modules(parts), [path for path, _ in parts.built.blocks], _frozen_parts(parts))


def _modules(parts: StepParts) -> list[torch.nn.Module]:
    """The trained module, or this rank's stages of it."""
    staged = parts.layout.staged
    return [parts.built.module] if staged is None else [stage.module for stage in staged.split.stages]


def _meshes(meshes: Meshes) -> list[Any]:
    several = [meshes.fsdp, meshes.tp, meshes.pp]
    if meshes.sizes.cp > 1:
        several.append(meshes.cp)
    if meshes.sizes.ep > 1:
        several.append(meshes.expert)
    return several


def _name_what_is_there(
    recorder: Recorder, parts: StepParts, states: Sequence[tuple[Tensor, dict[str, Tensor]]], batches: list[Batch]
) -> None:
    """Whatever the step finds in memory."""
    for module in [*_modules(parts), *_frozen_parts(parts).values()]:
        recorder.name(module.named_buffers(), "frozen")
        trained = ((n, p) for n, p in module.named_parameters() if p.requires_grad)
        recorder.name(trained, "parameter")
        recorder.name(((n, p) for n, p in module.named_parameters() if not p.requires_grad), "frozen")
    recorder.name(parts.masters.local.items(), "parameter")
    names = {id(shard): name for name, shard in parts.masters.local.items()}
    recorder.name(((names[id(shard)], state) for shard, own in states for state in own.values()), "optimizer")
    averages = parts.ema.state_dict().values()
    recorder.name(chain.from_iterable(average.items() for average in averages), "ema")
    recorder.name(((name, tensor) for batch in batches for name, tensor in batch.tensors.items()), "batch")


def _frozen_parts(parts: StepParts) -> dict[str, nn.Module]:
    """Frozen encoders by name, and the VAE."""
    frozen = parts.built.frozen
    if frozen is None:
        return {}
    found = {name: component.module for name, component in frozen.encoders.items()}
    return found | ({"vae": frozen.vae.module} if frozen.vae is not None else {})


def _name_gradients(recorder: Recorder, parts: StepParts) -> None:
    for name, shard in parts.masters.local.items():
        if shard.grad is not None:
            recorder.name([(name, shard.grad)], "gradient")


def _library_class(block: nn.Module) -> str:
    """The name of its class without the one that FSDP2 puts before it."""
    return next(one.__name__ for one in type(block).__mro__ if not issubclass(one, FSDPModule))


def _facts(recipe: Recipe, parts: StepParts, sizes: StepSizes, micro_batches: int, operators: list[Operator]) -> Facts:
    axes, staged = parts.meshes.sizes, parts.layout.staged
    passes = micro_batches * axes.data
    frozen = _frozen_parts(parts)
    encoding = sum(operator.flops for operator in operators if operator.module.partition(".")[0] in frozen)
    return Facts(
        rank=parts.ranks.rank,
        world=parts.ranks.world,
        sizes={
            "pp": axes.pp,
            "dp_replicate": axes.dp_replicate,
            "dp_shard": axes.dp_shard,
            "cp_ring": axes.cp_ring,
            "cp_ulysses": axes.cp_ulysses,
            "tp": axes.tp,
            "ep": axes.ep,
        },
        stages=(0,) if staged is None else tuple(stage.index for stage in staged.split.stages),
        micro_batches=micro_batches,
        samples=recipe.run.global_batch,
        tokens=sizes.tokens * passes,
        model_flops=sizes.model_flops * passes + encoding * axes.data,
        recomputed_flops=sizes.recomputed_flops * passes,
        parameters=sizes.parameters,
        trained_parameters=sizes.trained_parameters,
        blocks={path: _library_class(block) for _, path, block in _blocks(parts)},
        block_stages={path: stage for stage, path, _ in _blocks(parts)},
        compiled=recipe.run.compile,
        compute_dtype=recipe.precision.compute,
    )


def _blocks(parts: StepParts) -> list[tuple[int, str, torch.nn.Module]]:
    """(stage, path, block) of what this rank has."""
    staged = parts.layout.staged
    if staged is None:
        return [(0, path, block) for path, block in parts.built.blocks]
    names = [path for path, _ in parts.built.blocks]
    return [(stage.index, path, block) for stage in staged.split.stages for path, block in stage.own(names)]
