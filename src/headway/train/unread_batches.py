"""Micro-batches of the shapes that a recipe's data gives, without the data.

Floats are fake tensors. Small integers are real, since models read sizes and borders of documents out of their values:
captions fill half of their length, packed sequences hold two documents, each conversation has one picture.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.data import Batch
from headway.errors import UserError
from headway.models import BuiltModel
from headway.recipe import FlowMatchingRecipe, NextTokenRecipe, Recipe, TextEncoderRecipe

UNKNOWN_VOCABULARY = 1024
"""Words of captions that nobody has read."""


class UnreadTokenizer:
    """What a model must know of a tokenizer that is not there."""

    def __init__(self, encoder: TextEncoderRecipe) -> None:
        self.pad_token_id = int(encoder.config.get("pad_token_id", 0))
        self.bos_token_id = encoder.config.get("bos_token_id")
        self.eos_token_id = encoder.config.get("eos_token_id")
        words = encoder.config.get("vocab_size", UNKNOWN_VOCABULARY)
        self._size = 1 if encoder.path is not None else words

    def __len__(self) -> int:
        return self._size


def unread_tokenizers(recipe: Recipe) -> dict[str, Any]:
    """In place of each text encoder's tokenizer."""
    return {name: UnreadTokenizer(encoder) for name, encoder in recipe.model.text_encoders.items()}


def rehearsed_batch(recipe: Recipe, built: BuiltModel, empty: Callable[..., Tensor]) -> Batch:
    """A micro-batch. ``empty(*shape, dtype=…)`` makes tensors without values.

    Raises UserError for sizes that the model can't have.
    """
    size = recipe.run.micro_batch
    objective = recipe.objective
    if isinstance(objective, FlowMatchingRecipe):
        tensors = _pictures(recipe, built, size, empty)
    elif isinstance(objective, NextTokenRecipe):
        tensors = _documents(recipe, size)
    else:
        tensors = _conversations(recipe, built, size, empty)
    tensors["weight"] = empty(size, dtype=torch.float32)
    return Batch(tensors, positions=list(range(size)))


def _pictures(recipe: Recipe, built: BuiltModel, size: int, empty: Callable[..., Tensor]) -> dict[str, Tensor]:
    """See FlowMatchingCollate."""
    frozen, data = built.frozen, recipe.data
    if frozen is None:
        raise UserError(f"objective.kind = 'flow_matching' needs a diffusion model, not {recipe.model.class_name}")
    side = data.resolution
    height, width = (side, side) if isinstance(side, int) else side
    frames = (data.frames,) if frozen.family.video else ()
    latents = frozen.latent_shape(data.resolution, data.frames)
    tensors = {
        "pixels": empty(size, 3, *frames, height, width, dtype=torch.uint8),
        "noise": empty(size, *latents, dtype=torch.float32),
        "timestep_draw": empty(size, dtype=torch.float32),
    }
    if frozen.vae is not None:
        tensors["posterior_noise"] = empty(size, *latents, dtype=torch.float32)
    for name, encoder in recipe.model.text_encoders.items():
        padding = frozen.padding[name]
        tokens = torch.full((size, encoder.max_length), padding, dtype=torch.int64)
        tokens[:, : -(-encoder.max_length // 2)] = 1 if padding != 1 else 2
        tensors[f"tokens.{name}"] = tokens
    return tensors


def _documents(recipe: Recipe, size: int) -> dict[str, Tensor]:
    """See NextTokenCollate."""
    length = recipe.data.sequence_length
    positions = torch.arange(length)
    if recipe.data.packing:
        positions[length // 2 :] -= length // 2
    return {
        "input_ids": torch.zeros(size, length, dtype=torch.int64),
        "labels": torch.zeros(size, length, dtype=torch.int64),
        "position_ids": positions.expand(size, length).contiguous(),
    }


def _conversations(recipe: Recipe, built: BuiltModel, size: int, empty: Callable[..., Tensor]) -> dict[str, Tensor]:
    """See VisionLanguageCollate. A picture takes as many patches as ``data.resolution`` has."""
    config: Any = built.module.config
    vision, length = config.vision_config, recipe.data.sequence_length
    side = recipe.data.resolution
    unit = vision.patch_size * vision.spatial_merge_size
    grid = [
        1,
        *(
            max(1, round(s / unit)) * vision.spatial_merge_size
            for s in ((side, side) if isinstance(side, int) else side)
        ),
    ]
    seen = math.prod(grid) // vision.spatial_merge_size**2
    if seen >= length:
        raise UserError(
            f"data.sequence_length = {length} has no room for the {seen} tokens of a picture of data.resolution = "
            f"{side}: raise the one or lower the other"
        )
    ids = torch.zeros(size, length, dtype=torch.int64)
    ids[:, :seen] = config.image_token_id
    features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "labels": torch.zeros_like(ids),
        "pixel_values": empty(size * math.prod(grid), features, dtype=torch.float32),
        "image_grid_thw": torch.tensor([grid] * size),
    }
