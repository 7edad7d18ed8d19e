"""Flow matching: the model predicts the velocity from data to noise (Lipman et al. 2022; Esser et al. 2024)."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from headway.data import Batch, Sample, normals, uniform
from headway.models import CaptionTokens, FrozenParts, timestep_shift
from headway.recipe import FlowMatchingRecipe
from headway.train.objectives.objective import Objective


@dataclass(frozen=True)
class FlowMatchingCollate:
    """Samples to one micro-batch, in the loader's workers. All draws are keyed by (seed, stream, position, step)."""

    objective: FlowMatchingRecipe
    seed: int
    purpose: str
    """``train`` or ``validation``: separate random streams; validation never drops its condition."""
    latent_shape: tuple[int, ...]
    """(C, H, W) or (C, F, H, W) of what the model denoises."""
    posterior: bool
    """Whether a VAE's posterior is sampled (its noise has the latents' shape)."""
    caption_tokens: CaptionTokens

    def __call__(self, samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
        """``pixels`` uint8 (B, 3, [F,] H, W), ``noise`` and ``timestep_draw`` float32, ``tokens.*`` int64 (B, L)."""
        pictures = [sample.image if sample.image is not None else sample.video for sample in samples]
        captions = [
            "" if self._dropped(position, step) else sample.caption or ""
            for sample, position in zip(samples, positions, strict=True)
        ]
        batch = {
            "pixels": torch.stack([picture for picture in pictures if picture is not None]),
            "noise": self._normal("noise", positions, step, self.latent_shape),
            "timestep_draw": self._timestep_draw(positions, step),
            "weight": torch.ones(len(samples)),
        }
        if self.posterior:
            batch["posterior_noise"] = self._normal("posterior", positions, step, self.latent_shape)
        return batch | {f"tokens.{name}": ids for name, ids in self.caption_tokens(captions).items()}

    def _dropped(self, position: int, step: int) -> bool:
        if self.purpose != "train":
            return False
        draw = uniform(1, seed=self.seed, stream="train.condition_dropout", position=position, step=step)
        return bool(draw.item() < self.objective.condition_dropout)

    def _normal(self, stream: str, positions: list[int], step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return normals(shape, seed=self.seed, stream=f"{self.purpose}.{stream}", positions=positions, step=step)

    def _timestep_draw(self, positions: list[int], step: int) -> torch.Tensor:
        """Uniform or standard normal, as the recipe's timestep distribution needs: (B,)."""
        if self.objective.timesteps == "logit_normal":
            return self._normal("timestep", positions, step, (1,)).squeeze(1)
        name = f"{self.purpose}.timestep"
        return torch.cat([uniform(1, seed=self.seed, stream=name, position=p, step=step) for p in positions])


@dataclass(frozen=True)
class DenoiserInput:
    """A micro-batch as the denoiser sees it."""

    noisy: torch.Tensor
    """float32 (B, C, [F,] H, W)."""
    sigma: torch.Tensor
    """float32 (B,)."""
    tokens: dict[str, torch.Tensor]
    """int64 (B, L) for each text encoder."""
    condition: dict[str, Any]
    """The frozen text encoders' features."""


@dataclass(frozen=True)
class NoisyLatents(DenoiserInput):
    """What the denoiser sees of training data, and what its velocity should be."""

    target: torch.Tensor
    """noise - data, float32, shaped like ``noisy``."""
    weight: torch.Tensor
    """float32 (B,)."""


class FlowMatching(Objective[NoisyLatents]):
    """Σ over samples of weight · w(σ) · mean squared error of the velocity."""

    def __init__(self, objective: FlowMatchingRecipe, frozen: FrozenParts, image_tokens: int) -> None:
        self.objective = objective
        self.frozen = frozen
        self.image_tokens = image_tokens
        self.shift = timestep_shift(objective, image_tokens)

    def weight(self, batch: Batch) -> torch.Tensor:
        """Samples that count, a float32 scalar."""
        return batch.tensors["weight"].sum()

    def tokens(self, batch: Batch) -> int:
        """Image or video tokens that the transformer sees for this micro-batch."""
        return len(batch.positions) * self.image_tokens

    def prepare(self, batch: Batch) -> NoisyLatents:
        """See Objective."""
        tensors = batch.tensors
        pixels = tensors["pixels"].float() / 127.5 - 1
        latents = self.frozen.encode(pixels, tensors.get("posterior_noise"))
        noise = tensors["noise"]
        sigma = self.sigma(tensors["timestep_draw"])
        tokens = {name.removeprefix("tokens."): t for name, t in tensors.items() if name.startswith("tokens.")}
        return NoisyLatents(
            noisy=torch.lerp(latents, noise, sigma.view(-1, *[1] * (latents.dim() - 1))),
            sigma=sigma,
            target=noise - latents,
            tokens=tokens,
            condition=self.frozen.encode_text(tokens),
            weight=tensors["weight"],
        )

    def predict(self, model: torch.nn.Module, prepared: NoisyLatents) -> torch.Tensor:
        """The velocity, in the compute dtype, shaped like the latents."""
        return velocity(model, prepared, self.objective.guidance)

    def loss_of(self, prediction: torch.Tensor, prepared: NoisyLatents) -> torch.Tensor:
        """The weighted sum over the micro-batch, a float32 scalar to be divided by the global weight."""
        error = (prediction.float() - prepared.target).square().flatten(1).mean(1)
        return (error * sigma_weight(self.objective, prepared.sigma) * prepared.weight).sum()

    def sigma(self, draw: torch.Tensor) -> torch.Tensor:
        """Noise level in (0, 1) from the keyed draw, shifted towards noise: (B,) float32."""
        if self.objective.timesteps == "logit_normal":
            draw = torch.sigmoid(self.objective.logit_mean + self.objective.logit_std * draw)
        return self.shift * draw / (1 + (self.shift - 1) * draw)


def velocity(model: torch.nn.Module, denoised: DenoiserInput, guidance: float) -> torch.Tensor:
    """What ``model`` predicts, in the compute dtype, shaped like the latents."""
    predicted: torch.Tensor = model(
        denoised.noisy, denoised.sigma, tokens=denoised.tokens, condition=denoised.condition, guidance=guidance
    )
    return predicted


def sigma_weight(objective: FlowMatchingRecipe, sigma: torch.Tensor) -> torch.Tensor:
    """Loss weighting of Esser et al. 2024, section 3.1 (sigma_sqrt is the ε-loss σ⁻², bounded at σ = 0.01)."""
    match objective.weighting:
        case "sigma_sqrt":
            return sigma.clamp(min=1e-2).pow(-2)
        case "cosmap":
            return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma.square()))
    return torch.ones_like(sigma)
