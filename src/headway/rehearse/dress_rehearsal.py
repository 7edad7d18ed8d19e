"""The real Trainer's step of one rank of many, without ranks, values, data or weights, and the Record of it."""

import torch
from torch import Tensor

from headway.models import build_model
from headway.parallel import Ranks
from headway.recipe import Recipe, accumulation, sizes
from headway.rehearse.fake_program import FakeValues, fake_ranks
from headway.rehearse.frozen_calls import repeat_frozen_calls
from headway.rehearse.patches import even_experts, recorded_streams, without_ranks
from headway.rehearse.record import Record
from headway.rehearse.recorded_step import record_step
from headway.rehearse.stage_blocks import with_cuts
from headway.rehearse.step_sizes import step_sizes
from headway.rehearse.streams import Device
from headway.train.assembly import assemble_step
from headway.train.flops import Flops
from headway.train.unread_batches import rehearsed_batch, unread_tokenizers


def rehearse_whole(recipe: Recipe, devices: int, rank: int) -> Record:
    """Run the step of ``rank`` of ``devices``, every block of it. Raises UserError for a recipe that can't run so."""
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
        with values.mode, even_experts():
            repeated = repeat_frozen_calls(recipe, built)
            return record_step(recipe, parts, batches, device, counted, values_read, values.run, repeated)


def values_read(values: Tensor) -> list[float]:
    """What the host reads in an ordinary step: a finite loss, and gradients that are to be clipped."""
    loss, squared_norm, weight = 1.0, 1e12, 1.0
    return [loss, squared_norm, weight, *[0.0] * (values.numel() - 3)]
