"""Pictures and videos drawn from the sharded model on all ranks, without gathering it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler

from headway.data import normal
from headway.models import FrozenParts
from headway.parallel import Meshes
from headway.recipe import SampleRecipe
from headway.train.objectives.flow_matching import DenoiserInput

Predict = Callable[[DenoiserInput], torch.Tensor]
"""The model's velocity, on every rank that works on the same pictures."""


@dataclass(frozen=True)
class Sampler:
    """Euler's method from noise to data with classifier-free guidance (Ho & Salimans 2022)."""

    recipe: SampleRecipe
    frozen: FrozenParts
    latent_shape: tuple[int, ...]
    shift: float
    distilled: bool
    """The model takes the guidance as an input (FLUX.1): it is not applied a second time, as in its pipeline."""
    meshes: Meshes
    device: torch.device
    batch: int
    """Pictures of one forward pass on one rank."""

    @torch.no_grad()
    def draw(self, predict: Predict) -> torch.Tensor:
        """uint8 (prompts * per_prompt, [F,] H, W, 3) in the prompts' order, on every rank, on the CPU.

        The pictures are shared out over the data ranks; each makes the same number of forward passes. Noise is keyed by
        the picture's number, so that the ranks' number changes nothing.
        """
        captions = [prompt for prompt in self.recipe.prompts for _ in range(self.recipe.per_prompt)]
        share = -(-len(captions) // self.meshes.sizes.data)
        numbers = [min(self.meshes.data_rank * share + i, len(captions) - 1) for i in range(share)]
        pictures = [
            self._denoise(predict, [captions[n] for n in chunk], chunk)
            for chunk in (numbers[i : i + self.batch] for i in range(0, share, self.batch))
        ]
        mine = torch.cat(pictures).to(self.device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        firsts = self.meshes.first_ranks_of_data_ranks()
        return torch.cat([gathered[rank] for rank in firsts])[: len(captions)].cpu()

    def _denoise(self, predict: Predict, captions: list[str], numbers: list[int]) -> torch.Tensor:
        device = self.device
        guided = self.recipe.guidance != 1.0 and not self.distilled
        prompts = [*captions, *[""] * len(captions)] if guided else captions
        tokens = {name: t.to(device) for name, t in self.frozen.caption_tokens(prompts).items()}
        condition = self.frozen.encode_text(tokens)
        noise = [
            normal(self.latent_shape, seed=self.recipe.seed, stream="sample.noise", position=n, step=0) for n in numbers
        ]
        latents = torch.stack(noise).to(device)
        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=self.shift)
        scheduler.set_timesteps(self.recipe.steps, device=device)
        for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
            noisy = torch.cat([latents, latents]) if guided else latents
            velocity = predict(DenoiserInput(noisy, sigma.expand(len(noisy)).to(device), tokens, condition)).float()
            if guided:
                with_caption, without = velocity.chunk(2)
                velocity = without + self.recipe.guidance * (with_caption - without)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return self.frozen.decode(latents)
