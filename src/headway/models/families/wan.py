"""Wan 2.1 text to video: five-dimensional latents, UMT5 states zeroed on padding."""

import html
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headway.models.text import TextFeatures


def clean_caption(caption: str) -> str:
    """WanPipeline's cleaning without ftfy's repair of broken encodings (which the pipeline skips when it is absent)."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption)).strip()).strip()


def widths(config: Any, encoders: Mapping[str, Any]) -> list[tuple[str, int]]:
    """See Family.widths."""
    return [("text_dim", encoders["text_encoder"].d_model)]


def encode(name: str, encoder: Any, tokens: Tensor, mask: Tensor) -> TextFeatures:
    """Last states, attended within the caption and zero after it (as WanPipeline.encode_prompt)."""
    states = encoder(tokens, attention_mask=mask.long()).last_hidden_state
    return TextFeatures(states * mask.unsqueeze(-1), None, mask)


def velocity(
    transformer: Any, noisy: Tensor, timestep: Tensor, features: dict[str, TextFeatures], guidance: Tensor
) -> Tensor:
    """See VelocityCall; ``noisy`` is (B, C, F, H, W)."""
    output: Tensor = transformer(
        hidden_states=noisy,
        timestep=timestep * 1000,
        encoder_hidden_states=features["text_encoder"].sequence.to(noisy.dtype),
        return_dict=False,
    )[0]
    return output
