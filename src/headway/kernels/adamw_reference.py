"""AdamW over many tensors in plain PyTorch: what every device without a kernel runs, and what the kernel is held to.

Of each element, with g the gradient times its scale (the clip coefficient), t the number of the update, from 1:

    m ← m + (1 − β₁)(g − m)          v ← β₂·v + (1 − β₂)·g²
    w ← round(w·(1 − lr·decay) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε))
    a ← a + c·(w − a)     for each average, of the rounded w: of what the model computes with

(Loshchilov & Hutter 2019, in the order of torch.optim.AdamW.) In float32; in float64 for float64 weights.
"""

import torch
from torch import Tensor

from headway.kernels.stochastic_rounding import Place, random_bits, round_stochastically


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    averages: list[Tensor],
    scale: Tensor,
    keeps: list[float],
    average_weights: list[float],
    step_size: float,
    betas: tuple[float, float],
    epsilon: float,
    correction: float,
    places: list[Place],
    keys: list[int],
    step: int,
) -> None:
    """Change weights, moments and averages in place.

    ``averages`` are len(weights) for each of ``average_weights``; ``keeps`` is 1 − lr·decay of each tensor,
    ``step_size`` lr / (1 − β₁ᵗ), ``correction`` √(1 − β₂ᵗ). Without ``keys`` weights are rounded to nearest.
    """
    count = len(weights)
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        first, second = exp_avgs[number], exp_avg_sqs[number]
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        scaled = gradient.to(wide) * scale.to(wide)
        first.lerp_(scaled.to(first.dtype), 1 - betas[0])
        second.mul_(betas[1]).addcmul_(scaled.to(second.dtype), scaled.to(second.dtype), value=1 - betas[1])
        denominator = (second.to(wide).sqrt() / correction).add_(epsilon)
        changed = (weight.to(wide) * keeps[number]).addcdiv_(first.to(wide), denominator, value=-step_size)
        if keys:
            bits = random_bits(places[number], weight.numel(), key=keys[number], step=step, device=weight.device)
            changed = round_stochastically(changed, bits)
        weight.copy_(changed)
        for place, average_weight in enumerate(average_weights):
            average = averages[place * count + number]
            average.lerp_(weight.to(average.dtype), average_weight)
