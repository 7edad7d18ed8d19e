"""Stable Diffusion 3: two CLIPs side by side, then T5 tokens when there is a T5; pooled CLIP vectors joined."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headway.models.text import TextFeatures


def widths(config: Any, encoders: Mapping[str, Any]) -> list[tuple[str, int]]:
    """See Family.widths. The CLIPs' joined states are padded up to the width of T5, never cut."""
    clips = [encoders["text_encoder"], encoders["text_encoder_2"]]
    joined = sum(clip.hidden_size for clip in clips)
    t5 = encoders["text_encoder_3"].d_model if "text_encoder_3" in encoders else config["joint_attention_dim"]
    return [("pooled_projection_dim", sum(c.projection_dim for c in clips)), ("joint_attention_dim", max(joined, t5))]


def encode(name: str, encoder: Any, tokens: Tensor, mask: Tensor) -> TextFeatures:
    """CLIPs give the states before their last layer and the projected vector, T5 its last states; no padding mask."""
    if name == "text_encoder_3":
        return TextFeatures(encoder(tokens).last_hidden_state, None, mask)
    output = encoder(tokens, output_hidden_states=True)
    return TextFeatures(output.hidden_states[-2], output.text_embeds, mask)


def velocity(
    transformer: Any, noisy: Tensor, timestep: Tensor, features: dict[str, TextFeatures], guidance: Tensor
) -> Tensor:
    """See VelocityCall. Without a T5 there are no T5 tokens: what the pipeline does with max_sequence_length=0."""
    first, second = features["text_encoder"], features["text_encoder_2"]
    assert first.pooled is not None
    assert second.pooled is not None
    text = torch.cat([first.sequence, second.sequence], -1)
    text = nn.functional.pad(text, (0, transformer.config.joint_attention_dim - text.shape[-1]))
    if "text_encoder_3" in features:
        text = torch.cat([text, features["text_encoder_3"].sequence.to(text.dtype)], 1)
    output: Tensor = transformer(
        hidden_states=noisy,
        timestep=timestep * 1000,
        encoder_hidden_states=text.to(noisy.dtype),
        pooled_projections=torch.cat([first.pooled, second.pooled], -1).to(noisy.dtype),
        return_dict=False,
    )[0]
    return output
