"""The routers of a mixture of experts within a training step: their losses over the global batch, and what they did."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.models import RouterLosses, check_routers, find_routers, own_balance_coefficient
from headway.recipe import NextTokenRecipe, Recipe


class Routing:
    """Router losses of one run."""

    def __init__(self, losses: RouterLosses, exact: bool) -> None:
        self.losses = losses
        self._exact = exact

    def begin_step(self, scale: Tensor, forward: Callable[[], Any]) -> None:
        """Before the passes of a step; ``scale`` as for its loss.

        ``forward`` takes the step's micro-batches through the model without gradients, on all ranks.
        """
        self.losses.begin_step(scale)
        if self._exact:
            with self.losses.counting():
                forward()
            self.losses.use(self._summed())

    def finish_step(self) -> Tensor:
        """After the passes of a step: the report of all layers, float64 (2 + 3 x layers), still on the device."""
        report = self.losses.finish_step(self._summed())
        parts = [report.balance.view(1), report.z.view(1), report.load, report.entropy, report.dropped]
        return torch.cat(parts).double()

    def _summed(self) -> Tensor:
        totals = self.losses.take_totals()
        dist.all_reduce(totals)
        return totals


def named(report: list[float]) -> dict[str, Any]:
    """A report of ``finish_step`` for metrics.jsonl; by layer: load of the busiest expert, entropy, dropped pairs."""
    balance, z, *layers = report
    number = len(layers) // 3
    return {
        "balance_loss": balance,
        "z_loss": z,
        "load": layers[:number],
        "entropy": layers[number : 2 * number],
        "dropped": layers[2 * number :],
    }


def routing_of(recipe: Recipe, model: Any, device: torch.device, cp: int) -> Routing | None:
    """What ``recipe`` asks of the routers of ``model``, still whole; None where it asks nothing.

    Raises UserError when it asks what can't be.
    """
    objective = recipe.objective
    if not isinstance(objective, NextTokenRecipe):
        return None
    routers = find_routers(model)
    asked = (objective.router_balance, objective.router_z, objective.expert_capacity)
    if not routers and not any(asked):
        return None
    check_routers(model, routers, capacity=objective.expert_capacity, cp=cp)
    balance = objective.router_balance
    losses = RouterLosses(
        routers,
        device,
        balance=own_balance_coefficient(model) if balance is None else balance,
        z=objective.router_z,
        capacity=objective.expert_capacity,
    )
    return Routing(losses, objective.router_exact)
