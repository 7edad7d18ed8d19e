"""Sana: masked states of a decoder-only text encoder (Gemma 2), deep-compression latents, scaled timesteps."""

from typing import Any

from torch import Tensor

from headway.models.families.pixart import encode as encode_masked
from headway.models.families.pixart import widths as widths
from headway.models.families.pixart import without_variance
from headway.models.text import TextFeatures


def encode(name: str, encoder: Any, tokens: Tensor, mask: Tensor) -> TextFeatures:
    """Last states, attended within the caption; no instruction is put before it (complex_human_instruction=None)."""
    return encode_masked(name, encoder, tokens, mask)


def velocity(
    transformer: Any, noisy: Tensor, timestep: Tensor, features: dict[str, TextFeatures], guidance: Tensor
) -> Tensor:
    """See VelocityCall."""
    text = features["text_encoder"]
    output = transformer(
        noisy,
        encoder_hidden_states=text.sequence.to(noisy.dtype),
        encoder_attention_mask=text.mask.to(noisy.dtype),
        timestep=timestep * 1000 * transformer.config.timestep_scale,
        return_dict=False,
    )[0]
    return without_variance(output, noisy)
