"""The routers of a mixture of experts: where they are in a model, and how many tokens their experts take at most.

transformers' routers return, for T = batch x length tokens, logits (T, E) over E experts, the weights (T, k) of the
experts they choose, and the chosen experts (T, k), which their sibling module ``experts`` gets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import UserError


@dataclass(frozen=True)
class Router:
    """One router of the whole model."""

    name: str
    experts: int


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a transformers model in its order; none of a model without experts.

    To be called on the whole model, before a pipeline takes its stages: losses are means over all layers.
    """
    modules = dict(model.named_modules())
    classes = router_classes(model)
    found = []
    for name, module in modules.items():
        experts = modules.get(experts_of(name))
        if isinstance(module, classes) and experts is not None:
            found.append(Router(name, next(experts.parameters()).shape[0]))
    return found


def experts_of(router: str) -> str:
    """The name of the module that computes what the router of this name chooses."""
    return f"{router.rpartition('.')[0]}.experts"


def router_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """What transformers can record router logits of, as the first of several outputs."""
    recorded = [record for module in model.modules() for record in _records(module)]
    return tuple({record.target_class for record in recorded if record.index == 0})


def _records(module: Any) -> list[Any]:
    record = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
    return record if isinstance(record, list) else [record] if record is not None else []


def own_balance_coefficient(model: Any) -> float:
    """What the balance loss is multiplied by, by the model's own config (``router_aux_loss_coef``); 0 without one."""
    return getattr(model.config.get_text_config(), "router_aux_loss_coef", None) or 0.0


def check_routers(model: nn.Module, routers: Sequence[Router], *, capacity: float | None, cp: int) -> None:
    """Raise UserError where what a recipe asks of routers cannot be: to be called when it asks anything."""
    if not routers:
        raise UserError(
            f"router losses and capacity need a mixture of experts, and {type(model).__name__} has no routers: leave "
            "them out"
        )
    if capacity is not None and cp > 1:
        raise UserError(
            f"a capacity of {capacity} limits the experts of each whole sequence, and layout.cp = {cp} splits "
            "sequences: set layout.cp = 1, or leave the capacity out"
        )


def within_capacity(weights: Tensor, chosen: Tensor, tokens: Tensor, experts: int, factor: float) -> Tensor:
    """Which (token, chosen expert) pairs are kept: bool (B·L, k).

    Of each sequence with n tokens that count (``tokens`` (B, L), nonzero), an expert keeps at most
    ceil(factor · k · n / E): those with the largest ``weights`` (B·L, k), of equal ones the first. Tokens that do not
    count are not kept. Sequences are limited one by one because then it does not depend on what else a rank or a
    micro-batch holds; an expert's tokens of any batch are bounded by ``factor`` times the mean all the same. The price:
    a sequence that needs few experts loses more than under a limit over a batch.
    """
    batch, length = tokens.shape
    per_token = chosen.shape[1]
    real = tokens.bool().unsqueeze(-1).expand(batch, length, per_token).reshape(batch, -1)
    priority = weights.float().view(batch, -1).masked_fill(~real, -torch.inf)
    by_priority = priority.argsort(dim=1, descending=True, stable=True)
    expert = chosen.view(batch, -1).gather(1, by_priority)
    by_expert = expert.argsort(dim=1, stable=True)
    order, expert = by_priority.gather(1, by_expert), expert.gather(1, by_expert)
    numbers = torch.zeros(batch, experts, dtype=torch.int64, device=chosen.device)
    numbers = numbers.scatter_add(1, expert, torch.ones_like(expert))
    first = numbers.cumsum(1) - numbers
    place = torch.arange(expert.shape[1], device=chosen.device) - first.gather(1, expert)
    limit = (tokens.bool().sum(1, keepdim=True).double() * (factor * per_token / experts)).ceil()
    kept = torch.zeros_like(real).scatter(1, order, place < limit)
    return (kept & real).view(-1, per_token)
