"""What the denoiser sees in place of pixels: a frozen VAE's scaled latents, or pixels folded into channels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headway.errors import UserError

VAE_CLASSES = ("AutoencoderKL", "AutoencoderKLWan", "AutoencoderDC")


class LatentGrid(NamedTuple):
    """How many pixels and frames one latent stands for, and how many channels it has."""

    channels: int
    spatial: int
    temporal: int

    def shape(self, height: int, width: int, frames: int, video: bool) -> tuple[int, ...]:
        """(C, H, W), or (C, F, H, W) of a video model. UserError when the pixels or frames do not divide."""
        if height % self.spatial or width % self.spatial:
            raise UserError(
                f"data.resolution = {height}x{width} is not a multiple of {self.spatial}, the side of a latent"
            )
        space = (height // self.spatial, width // self.spatial)
        if not video:
            if frames != 1:
                raise UserError(f"data.frames = {frames}: the model makes pictures, set it to 1")
            return (self.channels, *space)
        if (frames - 1) % self.temporal:
            raise UserError(f"data.frames = {frames} is not 1 + a multiple of {self.temporal}, the frames of a latent")
        return (self.channels, (frames - 1) // self.temporal + 1, *space)


class FoldedPixels:
    """No VAE: squares of ``side`` x ``side`` pixels in [-1, 1] become channels, exactly reversibly."""

    def __init__(self, side: int) -> None:
        self.grid = LatentGrid(3 * side**2, side, 1)

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """(B, 3[, F], H, W) -> (B, 3·side²[, F], H/side, W/side) float32. There is no posterior to draw from."""
        return _per_frame(functional.pixel_unshuffle, pixels.float(), self.grid.spatial)

    def decode(self, latents: Tensor) -> Tensor:
        """The reverse of encode."""
        return _per_frame(functional.pixel_shuffle, latents.float(), self.grid.spatial)


class VaeLatents:
    """A frozen VAE, with the shift and scale that its pipelines apply to latents."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.grid = _grid(type(vae).__name__, vae.config)

    @torch.no_grad()
    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Pixels (B, 3[, F], H, W) in [-1, 1] -> scaled float32 latents.

        ``noise``, standard normal and shaped like the latents, draws from the VAE's posterior; None takes its mode.
        """
        encoded = self.vae.encode(pixels.to(next(self.vae.parameters()).dtype))
        if not hasattr(encoded, "latent_dist"):  # AutoencoderDC has no posterior
            return self._scaled(encoded.latent.float())
        posterior = encoded.latent_dist
        latents = posterior.mode() if noise is None else posterior.mean + posterior.std * noise.to(posterior.mean.dtype)
        return self._scaled(latents.float())

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents -> pixels (B, 3[, F], H, W) float32, about [-1, 1]."""
        mean, std = self._moments(latents)
        unscaled = latents.float() * std + mean
        pixels: Tensor = self.vae.decode(unscaled.to(next(self.vae.parameters()).dtype)).sample
        return pixels.float()

    def _scaled(self, latents: Tensor) -> Tensor:
        mean, std = self._moments(latents)
        return (latents - mean) / std

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of raw latents as the config knows them, by channel or one for all."""
        config = self.vae.config
        if type(self.vae).__name__ == "AutoencoderKLWan":
            values = torch.tensor([config.latents_mean, config.latents_std], device=latents.device)
            return values[0].view(1, -1, 1, 1, 1), values[1].view(1, -1, 1, 1, 1)
        values = torch.tensor([config.get("shift_factor") or 0.0, 1.0 / config.scaling_factor], device=latents.device)
        return values[0], values[1]


def to_uint8(pixels: Tensor) -> Tensor:
    """Pixels (B, 3[, F], H, W) in [-1, 1], clipped -> (B[, F], H, W, 3) uint8 on the CPU."""
    return pixels.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8).movedim(1, -1).cpu()


def _grid(class_name: str, config: Any) -> LatentGrid:
    if class_name == "AutoencoderKLWan":
        return LatentGrid(config.z_dim, config.scale_factor_spatial, config.scale_factor_temporal)
    if class_name == "AutoencoderDC":
        return LatentGrid(config.latent_channels, 2 ** (len(config.encoder_block_out_channels) - 1), 1)
    return LatentGrid(config.latent_channels, 2 ** (len(config.block_out_channels) - 1), 1)


def _per_frame(fold: Callable[[Tensor, int], Tensor], pixels: Tensor, side: int) -> Tensor:
    """Apply a fold of (…, C, H, W) to pictures (B, C, H, W) or to each frame of videos (B, C, F, H, W)."""
    return fold(pixels, side) if pixels.ndim == 4 else fold(pixels.transpose(1, 2), side).transpose(1, 2)
