"""Pictures and videos drawn from the sharded model on all ranks, without gathering it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler

from headway.data import normal
from headway.models import FrozenParts
from headway.parallel import Ranks
from headway.recipe import SampleRecipe


@dataclass(frozen=True)
class Sampler:
    """Euler's method from noise to data with classifier-free guidance (Ho & Salimans 2022)."""

    recipe: SampleRecipe
    frozen: FrozenParts
    latent_shape: tuple[int, ...]
    shift: float
    distilled: bool
    """The model takes the guidance as an input (FLUX.1): it is not applied a second time, as in its pipeline."""
    ranks: Ranks
    batch: int
    """Pictures of one forward pass on one rank."""

    def draw(self, model: torch.nn.Module) -> torch.Tensor:
        """uint8 (prompts * per_prompt, [F,] H, W, 3) in the prompts' order, on every rank, on the CPU.

        The pictures are shared out over the ranks; each makes the same number of forward passes. Noise is keyed by the
        picture's number, so that the ranks' number changes nothing.
        """
        captions = [prompt for prompt in self.recipe.prompts for _ in range(self.recipe.per_prompt)]
        share = -(-len(captions) // self.ranks.world)
        numbers = [min(self.ranks.rank * share + i, len(captions) - 1) for i in range(share)]
        was_training = model.training
        model.eval()
        with torch.no_grad():
            pictures = [
                self._denoise(model, [captions[n] for n in chunk], chunk)
                for chunk in (numbers[i : i + self.batch] for i in range(0, share, self.batch))
            ]
        model.train(was_training)
        mine = torch.cat(pictures).to(self.ranks.device)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks.world)]
        dist.all_gather(gathered, mine)
        return torch.cat(gathered)[: len(captions)].cpu()

    def _denoise(self, model: torch.nn.Module, captions: list[str], numbers: list[int]) -> torch.Tensor:
        device = self.ranks.device
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
            velocity = model(
                noisy,
                sigma.expand(len(noisy)).to(device),
                tokens=tokens,
                condition=condition,
                guidance=self.recipe.guidance,
            ).float()
            if guided:
                with_caption, without = velocity.chunk(2)
                velocity = without + self.recipe.guidance * (with_caption - without)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return self.frozen.decode(latents)
