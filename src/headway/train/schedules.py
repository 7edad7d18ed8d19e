"""Learning-rate schedules: pure functions of the step, so a resumed run needs no schedule state."""

import math
from collections.abc import Callable

from headway.recipe import OptimRecipe


def learning_rate_factor(optim: OptimRecipe, steps: int) -> Callable[[int], float]:
    """What the base learning rate is multiplied with at each step (0-based) of a run of ``steps`` steps.

    Warm-up: (step+1)/warmup_steps, so that the first step already learns. Then

    - constant: 1;
    - cosine (Loshchilov & Hutter 2017): half a cosine from 1 at the end of the warm-up to min_lr_ratio at ``steps``;
    - wsd (warm-up, stable, decay; Hu et al. 2024): 1, then a line to min_lr_ratio over the last ``decay_steps``.
    """
    low = optim.min_lr_ratio

    def decayed(begin: int, step: int) -> float:
        """Share of the way down, in [0, 1], of a decay from step ``begin`` to the end."""
        return min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))

    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        if optim.schedule == "cosine":
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * decayed(optim.warmup_steps, step)))
        if optim.schedule == "wsd":
            return 1 - (1 - low) * decayed(steps - optim.decay_steps, step)
        return 1.0

    return factor
