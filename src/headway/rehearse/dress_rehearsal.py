"""The real Trainer's step of one rank of many, without ranks, values, data or weights, and the Record of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from headway.models import build_model
from headway.parallel import Ranks
from headway.recipe import Recipe, accumulation, sizes
from headway.rehearse.contexts import Label
from headway.rehearse.fake_program import FakeValues, fake_ranks
from headway.rehearse.few_micro_batches import few_in_turn, few_through_stages
from headway.rehearse.frozen_calls import repeat_frozen_calls
from headway.rehearse.patches import even_experts, recorded_streams, without_ranks
from headway.rehearse.record import Record
from headway.rehearse.recorded_step import record_step
from headway.rehearse.recorder import Recorder
from headway.rehearse.stage_blocks import with_cuts
from headway.rehearse.step_sizes import step_sizes
from headway.rehearse.streams import Device
from headway.rehearse.understudies import StageEdges
from headway.train.assembly import StepParts, assemble_step
from headway.train.flops import Flops
from headway.train.unread_batches import rehearsed_batch, unread_tokenizers


def rehearse_whole(recipe: Recipe, devices: int, rank: int) -> Record:
    """Run the step of ``rank`` of ``devices``, all of it. Raises UserError for a recipe that can't run so."""
    return _rehearsed(recipe, devices, rank, lambda recorder, parts: nullcontext())


def rehearse_few_in_turn(recipe: Recipe, devices: int, rank: int) -> Record:
    """As ``rehearse_whole``, without a pipeline, but that few micro-batches pass: see ``few_micro_batches.py``."""
    number = accumulation(recipe.run.global_batch, recipe.run.micro_batch, sizes(recipe.layout, devices).data)
    return _rehearsed(recipe, devices, rank, lambda recorder, parts: few_in_turn(recorder, number))


def rehearse_few_through_stages(
    recipe: Recipe, devices: int, rank: int, orders: dict[int, list[Label]]
) -> tuple[Record, list[StageEdges]]:
    """As ``rehearse_whole``, but that this rank's stages go through ``orders``; what they are to their neighbours."""
    told: list[StageEdges] = []
    record = _rehearsed(
        recipe,
        devices,
        rank,
        lambda recorder, parts: few_through_stages(recorder, type(parts.objective), orders, told.extend),
    )
    return record, told


def _rehearsed(
    recipe: Recipe, devices: int, rank: int, passing: Callable[[Recorder, StepParts], AbstractContextManager[None]]
) -> Record:
    """``passing``: how micro-batches pass through the model."""
    recipe = with_cuts(recipe)
    eager = recipe.model_copy(update={"run": recipe.run.model_copy(update={"compile": False})})
    counted = step_sizes(eager)
    device, values = Device(), FakeValues()
    number = accumulation(recipe.run.global_batch, recipe.run.micro_batch, sizes(recipe.layout, devices).data)
    with fake_ranks(rank, devices), recorded_streams(device), without_ranks():
        built = build_model(
            recipe.model,
            recipe.precision,
            seed=recipe.run.seed,
            tokenizers=unread_tokenizers(recipe),
            placeholder=values.placeholder,
        )
        batches = [rehearsed_batch(recipe, built, values.empty) for _ in range(number)]
        ranks = Ranks(rank, devices, torch.device("cpu"))
        parts = assemble_step(eager, ranks, built, lambda tensors: Flops(0, 0, 0), data_fingerprint="")
        repeated = repeat_frozen_calls(recipe, built)
        with values.mode, even_experts(), ExitStack() as passes:

            def before(recorder: Recorder) -> None:
                repeated(recorder)
                passes.enter_context(passing(recorder, parts))

            return record_step(recipe, parts, batches, device, counted, values_read, values.run, before)


def values_read(values: Tensor) -> list[float]:
    """What the host reads in an ordinary step: a finite loss, and gradients that are to be clipped."""
    loss, squared_norm, weight = 1.0, 1e12, 1.0
    return [loss, squared_norm, weight, *[0.0] * (values.numel() - 3)]
