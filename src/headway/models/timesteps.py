"""How far a recipe shifts timesteps towards noise, which may depend on how many tokens a picture has."""

import math
from typing import Any

from headway.models.diffusion import DenoisingModel
from headway.recipe import FlowMatchingRecipe

# FLUX.1's schedule: log(shift) grows linearly with the number of image tokens between these two points.
RESOLUTION_SHIFT = ((256, 0.5), (4096, 1.15))


def image_tokens(module: DenoisingModel, latent_shape: tuple[int, ...]) -> int:
    """Tokens that the transformer makes of one sample's latents (C, [F,] H, W)."""
    config: Any = module.transformer.config
    size = config.patch_size
    patch = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return math.prod(latent_shape[1:]) // (math.prod(patch) * module.family.patch**2)


def timestep_shift(objective: FlowMatchingRecipe, tokens: int) -> float:
    """The recipe's shift, or FLUX.1's for this many image tokens: exp of a line through ``RESOLUTION_SHIFT``."""
    if objective.shift != "resolution":
        return objective.shift
    (low_tokens, low), (high_tokens, high) = RESOLUTION_SHIFT
    return math.exp(low + (high - low) * (tokens - low_tokens) / (high_tokens - low_tokens))
