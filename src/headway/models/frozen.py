"""The parts of a diffusion pipeline that do not train: text encoders and VAE, whole on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.component import Component
from headway.models.families import Family
from headway.models.latents import FoldedPixels, VaeLatents, to_uint8
from headway.models.text import CaptionTokens, TextFeatures


@dataclass
class FrozenParts:
    """Frozen text encoders and the way between pixels and latents of one pipeline."""

    family: Family
    caption_tokens: CaptionTokens
    """Captions -> token ids for all text encoders, frozen or not; used in the loader's workers."""
    padding: Mapping[str, int]
    encoders: Mapping[str, Component]
    vae: Component | None
    latents: VaeLatents | FoldedPixels

    def materialize(self, device: torch.device) -> None:
        """Read the weights onto ``device``."""
        for component in [*self.encoders.values(), *([self.vae] if self.vae else [])]:
            component.fill(device)

    @torch.no_grad()
    def encode_text(self, tokens: Mapping[str, Tensor]) -> dict[str, TextFeatures]:
        """Token ids (B, L) by encoder -> features of each frozen encoder; other encoders' tokens are left alone."""
        features = {}
        for name, component in self.encoders.items():
            mask = tokens[name] != self.padding[name]
            features[name] = self.family.encode(name, component.module, tokens[name], mask)
        return features

    def latent_shape(self, resolution: int | tuple[int, int], frames: int = 1) -> tuple[int, ...]:
        """(C, H, W) or (C, F, H, W) of one sample's latents. UserError when pixels or frames do not divide."""
        height, width = (resolution, resolution) if isinstance(resolution, int) else resolution
        return self.latents.grid.shape(height, width, frames, self.family.video)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Pixels (B, 3[, F], H, W) in [-1, 1] -> float32 latents: the posterior's mode, or drawn by ``noise``."""
        return self.latents.encode(pixels, noise)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents -> pictures (B, H, W, 3) or videos (B, F, H, W, 3), uint8 on the CPU."""
        return to_uint8(self.latents.decode(latents))
