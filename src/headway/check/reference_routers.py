"""The losses of a mixture of experts' routers, written out for a plain loop (what they are: see RouterLosses)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headway.models import find_routers
from headway.recipe import NextTokenRecipe


class RouterTerms:
    """Sums over a micro-batch's tokens that are added to its loss sum; nothing for a model without routers."""

    def __init__(self, model: nn.Module, objective: NextTokenRecipe) -> None:
        """``objective`` has the coefficients; the routers of ``model`` must not add losses by themselves."""
        self._balance, self._z, self._exact = (
            objective.router_balance or 0.0,
            objective.router_z,
            objective.router_exact,
        )
        self._ignored = objective.ignore_index
        routers = find_routers(model)
        self._fractions = [torch.zeros(router.experts, dtype=torch.float64) for router in routers]
        self._counts = [torch.zeros_like(fractions) for fractions in self._fractions]
        self._tokens = 0.0
        self._seen: list[tuple[Tensor, Tensor]] = []
        for router in routers:
            model.get_submodule(router.name).register_forward_hook(self._see)

    def _see(self, module: nn.Module, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, chosen = output
        self._seen.append((logits, chosen))

    @torch.no_grad()
    def begin_step(self, labels: list[Tensor], forward: Callable[[int], Any]) -> None:
        """``forward(number)`` takes the micro-batch of ``labels[number]`` through: exact losses need its loads."""
        if self._exact and self._fractions:
            for number, micro_batch in enumerate(labels):
                forward(number)
                self._count(micro_batch)
            self.finish_step()

    def term(self, labels: Tensor) -> Tensor:
        """Of the micro-batch that has just been through the model: float64 scalar, to be divided as its loss is."""
        counted = labels.flatten() != self._ignored
        terms = [torch.zeros((), dtype=torch.float64)]
        for (logits, _), fractions in zip(self._seen, self._fractions, strict=True):
            wide = logits[counted].double()
            balance = len(fractions) * (wide.softmax(-1) * fractions).sum()
            terms.append(self._balance * balance + self._z * wide.logsumexp(-1).square().sum())
        self._count(labels)
        return torch.stack(terms).sum() / max(1, len(self._fractions))

    @torch.no_grad()
    def _count(self, labels: Tensor) -> None:
        counted = labels.flatten() != self._ignored
        for (_, chosen), counts in zip(self._seen, self._counts, strict=True):
            counts += chosen[counted].flatten().bincount(minlength=len(counts))
        self._tokens += float(counted.sum())
        self._seen = []

    def finish_step(self) -> None:
        """Loads of the step become those that the next losses use."""
        self._fractions = [counts / max(self._tokens, 1.0) for counts in self._counts]
        self._counts = [torch.zeros_like(counts) for counts in self._counts]
        self._tokens = 0.0
