"""What all loops share: the model, its losses written by hand, and the numbers of the recipe."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from headway.models import build_model
from headway.recipe import Recipe
from headway.train.schedules import learning_rate_factor

Tensors = dict[str, Tensor]
Loss = Callable[[Any, Tensors], Tensor]
"""(model, micro-batch) -> mean loss, a float32 scalar."""


def image_loss(model: Any, batch: Tensors) -> Tensor:
    """Flow matching on pixels folded into channels, logit-normal timesteps: mean squared error of the velocity."""
    latents = functional.pixel_unshuffle(batch["pixels"].float() / 127.5 - 1, 4)
    noise = batch["noise"]
    sigma = torch.sigmoid(batch["timestep_draw"])
    noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1))
    tokens = {name.removeprefix("tokens."): ids for name, ids in batch.items() if name.startswith("tokens.")}
    velocity = model(noisy, sigma, tokens=tokens, condition={})
    return functional.mse_loss(velocity.float(), noise - latents)


def text_loss(model: Any, batch: Tensors) -> Tensor:
    """Next-token cross-entropy; every label counts."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


@dataclass
class Task:
    """A recipe's model before any layout, whole and filled, and what trains it."""

    recipe: Recipe
    model: nn.Module
    blocks: list[nn.Module]
    loss: Loss
    accumulation: int
    """Micro-batches of one step on one rank."""

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the forward and backward pass."""
        dtype: torch.dtype = getattr(torch, self.recipe.precision.compute)
        return dtype

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied with at a step (0-based)."""
        return learning_rate_factor(self.recipe.optim, self.recipe.run.steps)(step)

    def ema_decay(self, step: int) -> float:
        """Decay of the average at a step (0-based), with warm-up."""
        return min(self.recipe.ema.decays[0], (1 + step) / (10 + step))

    def optimizer(self, weights: list[nn.Parameter], fused: bool = True) -> torch.optim.AdamW:
        """AdamW; vectors get no weight decay."""
        optim = self.recipe.optim
        groups = [
            {"params": [w for w in weights if w.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)


def new_task(recipe: Recipe, tokenizers: dict[str, Any], accumulation: int) -> Task:
    """The recipe's model with the initial values that Headway gives it, on the CPU."""
    built = build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=tokenizers)
    built.materialize(torch.device("cpu"))
    built.module.train()
    loss = text_loss if recipe.objective.kind == "next_token" else image_loss
    return Task(recipe, built.module, [block for _, block in built.blocks], loss, accumulation)


class HandAverage:
    """An exponential moving average of weights (of this rank's shards), as one writes it by hand."""

    def __init__(self, task: Task, weights: Iterable[Tensor]) -> None:
        self.task = task
        self.weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        self.averages = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights that step ``step`` (0-based) left."""
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.task.ema_decay(step))
