"""Exponential moving averages of the weights, on each rank's shard: no communication, no gathered model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.errors import UserError
from headway.parallel import LaidOut, Masters
from headway.recipe import EmaRecipe


class Ema:
    """Averages of every trainable parameter of a sharded model, in float32, one set for each of ``recipe.decays``."""

    def __init__(self, masters: Masters, laid_out: LaidOut, recipe: EmaRecipe) -> None:
        self._masters = masters
        self._laid_out = laid_out
        self._recipe = recipe
        self._shards = [shard.detach() for shard in masters.local.values()]
        self._averages = {
            decay: [shard.to(torch.float32, copy=True) for shard in self._shards] for decay in recipe.decays
        }

    @property
    def decays(self) -> list[float]:
        """The recipe's decays."""
        return self._recipe.decays

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights that step ``step`` (0-based) left: average = d·average + (1-d)·weights.

        Runs at the last of each ``every`` steps, with d = decay**every, so that the averaging horizon in steps does not
        depend on ``every``. With warm-up decay is min(decay, (1+step)/(10+step)).
        """
        due = self.due(step)
        weights = [shard.float() for shard in self._shards] if due else []
        for averages, weight in due:
            torch._foreach_lerp_(averages, weights, weight)

    def due(self, step: int) -> list[tuple[list[torch.Tensor], float]]:
        """The averages that step ``step`` moves, in the order of the masters' shards, and by how much: 1 - d."""
        if (step + 1) % self._recipe.every:
            return []
        decays = {d: min(d, (1 + step) / (10 + step)) if self._recipe.warmup else d for d in self._averages}
        return [(self._averages[name], 1 - decay**self._recipe.every) for name, decay in decays.items()]

    @contextmanager
    def swapped_in(self, decay: float) -> Iterator[None]:
        """The model computes with the averages of ``decay`` (rounded to its own dtype) inside the context.

        The trained weights wait in a temporary copy of this rank's shard and are put back bit for bit, also after an
        exception. Every rank must enter it. Raises UserError when no such average is kept.
        """
        if decay not in self._averages:
            kept = ", ".join(map(str, self.decays)) or "none"
            raise UserError(f"no EMA with decay {decay} is kept; ema.decays has {kept}")
        trained = [shard.clone() for shard in self._shards]
        try:
            self._put_in(self._averages[decay])
            yield
        finally:
            self._put_in(trained)

    @torch.no_grad()
    def _put_in(self, weights: list[torch.Tensor]) -> None:
        for shard, weight in zip(self._shards, weights, strict=True):
            shard.copy_(weight)
        self._laid_out.masters_changed()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """{decay: {parameter name: float32 DTensor sharded like the parameter}}, sharing memory with the averages."""
        return {
            str(decay): {
                name: self._masters.like(name, average)
                for name, average in zip(self._masters.local, averages, strict=True)
            }
            for decay, averages in self._averages.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over averages as ``state_dict`` gives them, on the same mesh. Raises UserError when decays differ."""
        if state.keys() != {str(decay) for decay in self._averages}:
            raise UserError(
                f"the state holds EMA decays {', '.join(state) or 'none'}, but ema.decays has "
                f"{', '.join(map(str, self.decays)) or 'none'}: use the decays that the run began with"
            )
        for decay, averages in self._averages.items():
            for name, average in zip(self._masters.local, averages, strict=True):
                average.copy_(state[str(decay)][name].to_local())
