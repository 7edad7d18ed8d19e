"""AdamW of bfloat16 shards with stochastic rounding: clip, update and averages in one pass, alike on every layout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels import Average, Rounding, adamw_, key_of, place_of
from headway.parallel import Masters, own_piece

STREAM = "optimizer/rounding"


class StochasticAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for bfloat16 weights, with float32 moments and without float32 weights.

    An update is that of float32, rounded up or down at random so that its mean is exact (see
    ``kernels/stochastic_rounding.py``). The random numbers are keyed by (seed, parameter, element of the whole
    parameter, step): shards on any mesh get the bits that one device gives.
    """

    def __init__(self, masters: Masters, groups: list[dict[str, Any]], *, seed: int, **settings: Any) -> None:
        """``groups`` as of AdamW, of shards of ``masters``; ``settings``: lr, betas and eps.

        Raises ValueError for weights that are not bfloat16.
        """
        super().__init__(groups, settings)
        self._shards = list(masters.local.values())
        if any(shard.dtype != torch.bfloat16 for shard in self._shards):
            raise ValueError("stochastic rounding is of bfloat16 weights")
        pieces = {name: own_piece(whole) for name, whole in masters.whole.items()}
        self._places = [place_of(masters.whole[name].shape, p.offset, p.shape) for name, p in pieces.items()]
        self._keys = [key_of(seed, STREAM, name) for name in pieces]
        self._updates = [0] * len(self._shards)
        """Of each shard, on the host: what a rehearsal could not read of a state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Not of use: raises TypeError. An update needs the number of its step; see ``update``."""
        raise TypeError("StochasticAdamW takes its steps by update(step, scale)")

    @torch.no_grad()
    def update(self, step: int, scale: float, averages: Sequence[tuple[list[Tensor], float]] = ()) -> None:
        """Step number ``step`` of the run with gradients times ``scale``; move averages by their weights.

        ``averages``: a float32 tensor for each of the masters' shards, and the weight of the new ones. Those of shards
        without a gradient move, too.
        """
        numbers = {id(shard): number for number, shard in enumerate(self._shards)}
        for group in self.param_groups:
            chosen = [numbers[id(shard)] for shard in group["params"] if shard.grad is not None]
            still = [numbers[id(shard)] for shard in group["params"] if shard.grad is None]
            self._update_group(group, chosen, step, scale, averages)
            for tensors, weight in averages if still else ():
                torch._foreach_lerp_([tensors[n] for n in still], [self._shards[n].float() for n in still], weight)

    def _update_group(
        self,
        group: dict[str, Any],
        chosen: list[int],
        step: int,
        scale: float,
        averages: Sequence[tuple[list[Tensor], float]],
    ) -> None:
        if not chosen:
            return
        shards = [self._shards[number] for number in chosen]
        states = [self.state_of(shard) for shard in shards]
        for number, state in zip(chosen, states, strict=True):
            self._updates[number] += 1
            state["step"].fill_(self._updates[number])
        # Those that began later than others (a parameter that had no gradient before) have their own bias correction.
        for updates in sorted({self._updates[number] for number in chosen}):
            same = [place for place, number in enumerate(chosen) if self._updates[number] == updates]
            adamw_(
                [shards[place].detach() for place in same],
                [_gradient(shards[place]) for place in same],
                [states[place]["exp_avg"] for place in same],
                [states[place]["exp_avg_sq"] for place in same],
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decays=[group["weight_decay"]] * len(same),
                updates=updates,
                scale=torch.tensor(scale, dtype=torch.float32, device=shards[0].device),
                averages=[Average([tensors[chosen[place]] for place in same], weight) for tensors, weight in averages],
                rounding=Rounding(
                    [self._places[chosen[place]] for place in same], [self._keys[chosen[place]] for place in same], step
                ),
            )

    def state_of(self, shard: nn.Parameter) -> dict[str, Tensor]:
        """The moments and the count of updates, made where the first step has not made them yet."""
        state: dict[str, Tensor] = self.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(shard, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(shard, dtype=torch.float32)
        return state

    def state_loaded(self) -> None:
        """Take over the counts of updates after states were filled from a checkpoint."""
        self._updates = [int(self.state_of(shard)["step"]) for shard in self._shards]


def _gradient(shard: nn.Parameter) -> Tensor:
    assert shard.grad is not None
    return shard.grad
