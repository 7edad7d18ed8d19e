"""From a recipe to everything that takes its steps: data, model in its layout, objective, optimizers, averages."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from headway.data import (
    Batch,
    Collate,
    SampleOrder,
    Source,
    Tokenizer,
    captions_of,
    open_sources,
    open_tokenizer,
    word_tokenizer,
)
from headway.errors import UserError
from headway.models import BuiltModel, DenoisingModel, build_model
from headway.parallel import (
    Ranks,
    build_mesh,
    checkpoint_activations,
    compile_blocks,
    emulate_bfloat16_products,
    has_bfloat16_instructions,
    shard,
)
from headway.recipe import FlowMatchingRecipe, NextTokenRecipe, Recipe
from headway.train.ema import Ema
from headway.train.objectives.flow_matching import FlowMatching, FlowMatchingCollate, timestep_shift
from headway.train.objectives.next_token import NextToken, NextTokenCollate
from headway.train.optimizers import build_optimizers
from headway.train.sampling import Sampler


class Objective(Protocol):
    """What varies from one kind of training to another. Sums, never means: the Trainer divides by the global weight."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """Σ of weights of a micro-batch: float32 scalar, known before the model runs."""

    def tokens(self, batch: Batch) -> int:
        """Tokens that the model sees for a micro-batch."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Σ of weighted losses of a micro-batch: float32 scalar."""


@dataclass
class Assembly:
    """The parts of a run on this rank."""

    ranks: Ranks
    built: BuiltModel
    training_data: Source
    validation_data: Source | None
    objective: Objective
    collate: Collate
    validation_collate: Collate
    optimizers: list[torch.optim.Optimizer]
    ema: Ema
    sampler: Sampler | None
    """Of diffusion models with prompts to draw."""

    @property
    def model(self) -> nn.Module:
        """The sharded module that is trained."""
        return self.built.module


def assemble(recipe: Recipe, ranks: Ranks, cache: Path) -> Assembly:
    """Open the data, build, lay out and fill the model, and make what trains it. Raises UserError.

    Every rank must call it. ``cache`` is where indexes of the data go when the recipe names no place.
    """
    tokenizer = _language_tokenizer(recipe)
    training, validation = open_sources(
        recipe.data, cache=recipe.data.cache or cache / "data", tokenizer=tokenizer, seed=recipe.run.seed
    )
    made = {
        name: word_tokenizer(captions_of(training), encoder.max_length)
        for name, encoder in recipe.model.text_encoders.items()
        if encoder.tokenizer == "words"
    }
    built = build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=made)
    _lay_out(recipe, built, ranks)
    objective, collate, validation_collate = _objective(recipe, built, tokenizer)
    blocks = {id(parameter) for _, block in built.blocks for parameter in block.parameters()}
    matrices = [name for name, p in built.module.named_parameters() if id(p) in blocks and p.ndim == 2]
    return Assembly(
        ranks=ranks,
        built=built,
        training_data=training,
        validation_data=validation,
        objective=objective,
        collate=collate,
        validation_collate=validation_collate,
        optimizers=build_optimizers(built.module, recipe.optim, matrices),
        ema=Ema(built.module, recipe.ema),
        sampler=_sampler(recipe, built, ranks),
    )


def _lay_out(recipe: Recipe, built: BuiltModel, ranks: Ranks) -> None:
    """Checkpointing, compilation, then sharding: all on meta tensors. Only then does each rank fill its own slices."""
    if ranks.device.type == "cpu" and recipe.precision.compute == "bfloat16" and not has_bfloat16_instructions():
        emulate_bfloat16_products()
    blocks = [block for _, block in built.blocks]
    checkpoint_activations(blocks, recipe.memory.activation_checkpointing)
    if recipe.run.compile:
        compile_blocks(blocks)
    shard(built.module, blocks, build_mesh(recipe.layout, ranks.world, ranks.device.type), recipe.precision)
    built.materialize(ranks.device)
    built.module.train()


def _objective(
    recipe: Recipe, built: BuiltModel, tokenizer: Tokenizer | None
) -> tuple[Objective, Collate, Collate]:
    """The objective, and how its micro-batches are made for training and for validation."""
    match recipe.objective:
        case FlowMatchingRecipe() as flow_matching:
            return _flow_matching(recipe, flow_matching, built)
        case NextTokenRecipe() as next_token:
            assert tokenizer is not None
            collate = NextTokenCollate(
                next_token, recipe.data.sequence_length, recipe.data.packing, pad_token=tokenizer.padding
            )
            return NextToken(next_token), collate, collate
    raise UserError(f"objective.kind = {recipe.objective.kind!r} cannot train {recipe.model.class_name}")


def _flow_matching(
    recipe: Recipe, objective: FlowMatchingRecipe, built: BuiltModel
) -> tuple[Objective, Collate, Collate]:
    if built.frozen is None:
        raise UserError(f"objective.kind = 'flow_matching' needs a diffusion model, not {recipe.model.class_name}")
    shape = built.frozen.latent_shape(recipe.data.resolution, recipe.data.frames)
    collates = [
        FlowMatchingCollate(
            objective=objective,
            seed=recipe.run.seed,
            purpose=purpose,
            latent_shape=shape,
            posterior=built.frozen.vae is not None,
            caption_tokens=built.frozen.caption_tokens,
        )
        for purpose in ("train", "validation")
    ]
    return FlowMatching(objective, built.frozen, _image_tokens(built.module, shape)), *collates


def _sampler(recipe: Recipe, built: BuiltModel, ranks: Ranks) -> Sampler | None:
    if built.frozen is None or not recipe.sample.prompts:
        return None
    assert isinstance(recipe.objective, FlowMatchingRecipe)
    shape = built.frozen.latent_shape(recipe.data.resolution, recipe.data.frames)
    return Sampler(
        recipe.sample,
        built.frozen,
        latent_shape=shape,
        shift=timestep_shift(recipe.objective, _image_tokens(built.module, shape)),
        ranks=ranks,
        batch=recipe.run.micro_batch,
    )


def _image_tokens(module: nn.Module, latent_shape: tuple[int, ...]) -> int:
    """Tokens that the transformer makes of one sample's latents (C, [F,] H, W)."""
    assert isinstance(module, DenoisingModel)
    size = module.transformer.config.patch_size
    patch = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return math.prod(latent_shape[1:]) // (math.prod(patch) * module.family.patch**2)


def _language_tokenizer(recipe: Recipe) -> Tokenizer | None:
    if recipe.objective.kind != "next_token":
        return None
    name = recipe.model.tokenizer or recipe.model.path
    if name is None:
        raise UserError('model.tokenizer: required key is missing: a tokenizer folder, or "bytes"')
    return open_tokenizer(name)
