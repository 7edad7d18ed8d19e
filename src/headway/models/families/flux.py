"""FLUX.1: 2x2 latent pixels a token, positions by ids, T5 tokens and a pooled CLIP vector, distilled guidance."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.models.text import TextFeatures


def widths(config: Any, encoders: Mapping[str, Any]) -> list[tuple[str, int]]:
    """See Family.widths."""
    clip, t5 = encoders["text_encoder"], encoders["text_encoder_2"]
    return [("pooled_projection_dim", clip.hidden_size), ("joint_attention_dim", t5.d_model)]


def encode(name: str, encoder: Any, tokens: Tensor, mask: Tensor) -> TextFeatures:
    """CLIP gives its pooled vector, T5 its last states; neither masks padding (as FluxPipeline.encode_prompt)."""
    if name == "text_encoder":
        output = encoder(tokens)
        return TextFeatures(output.last_hidden_state, output.pooler_output, mask)
    return TextFeatures(encoder(tokens).last_hidden_state, None, mask)


def velocity(
    transformer: Any, noisy: Tensor, timestep: Tensor, features: dict[str, TextFeatures], guidance: Tensor
) -> Tensor:
    """See VelocityCall. The denoiser multiplies timestep and guidance by 1000 itself."""
    height, width = noisy.shape[-2:]
    text = features["text_encoder_2"].sequence.to(noisy.dtype)
    packed = transformer(
        hidden_states=pack(noisy),
        timestep=timestep,
        guidance=guidance if transformer.config.guidance_embeds else None,
        pooled_projections=_pooled(features["text_encoder"]).to(noisy.dtype),
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device),
        img_ids=image_ids(height // 2, width // 2, noisy.device),
        return_dict=False,
    )[0]
    return unpack(packed, height, width)


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H/2·W/2, 4C): each 2x2 square is one token."""
    batch, channels, height, width = latents.shape
    squares = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height // 2 * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, H/2·W/2, 4C) -> (B, C, H, W)."""
    batch, _, channels = tokens.shape
    squares = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows·columns, 3) float32: zero, row and column of each token."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3).float().to(device)


def _pooled(features: TextFeatures) -> Tensor:
    assert features.pooled is not None
    return features.pooled
