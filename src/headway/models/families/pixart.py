"""PixArt-α and PixArt-Σ: masked T5 states; a learned variance, where the denoiser has one, is not used."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headway.models.text import TextFeatures

PIXELS_PER_LATENT = 8


def clean_caption(caption: str) -> str:
    """The pipelines' own cleaning (clean_caption=False)."""
    return caption.lower().strip()


def widths(config: Any, encoders: Mapping[str, Any]) -> list[tuple[str, int]]:
    """See Family.widths."""
    return [("caption_channels", encoders["text_encoder"].hidden_size)]


def encode(name: str, encoder: Any, tokens: Tensor, mask: Tensor) -> TextFeatures:
    """Last states, attended within the caption."""
    return TextFeatures(encoder(tokens, attention_mask=mask.long()).last_hidden_state, None, mask)


def velocity(
    transformer: Any, noisy: Tensor, timestep: Tensor, features: dict[str, TextFeatures], guidance: Tensor
) -> Tensor:
    """See VelocityCall. 1024-pixel PixArt-α models are told the size of the picture."""
    text = features["text_encoder"]
    size: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if transformer.use_additional_conditions:
        batch, _, height, width = noisy.shape
        size["resolution"] = noisy.new_tensor([height, width]).mul(PIXELS_PER_LATENT).expand(batch, 2)
        size["aspect_ratio"] = noisy.new_tensor([height / width]).expand(batch, 1)
    output = transformer(
        noisy,
        encoder_hidden_states=text.sequence.to(noisy.dtype),
        encoder_attention_mask=text.mask.to(noisy.dtype),
        timestep=timestep * 1000,
        added_cond_kwargs=size,
        return_dict=False,
    )[0]
    return without_variance(output, noisy)


def without_variance(output: Tensor, noisy: Tensor) -> Tensor:
    """Drops the second half of the channels when the denoiser also predicts a variance."""
    return output[:, : noisy.shape[1]] if output.shape[1] == 2 * noisy.shape[1] else output
