"""Losses of a mixture of experts' routers over the global batch, and what the routers did.

A router gives T tokens logits (T, E) over E experts, and chooses k for each. With w_t = 1 for a token that counts and 0
for padding, over all tokens of a global batch, whatever ranks and micro-batches they are on::

    f_e = Σ_t w_t [e is chosen for t] / Σ_t w_t          P_e = Σ_t w_t softmax(logits_t)_e / Σ_t w_t

    balance loss = E · Σ_e f_e · P_e                     (Fedus et al. 2022, Switch Transformers, equations 4 to 6)
    z loss       = Σ_t w_t logsumexp(logits_t)² / Σ_t w_t          (Zoph et al. 2022, ST-MoE, equation 5)

each averaged over the layers. Over the global batch, not over each micro-batch, because balance within a few sequences
keeps experts from specialising (Qiu et al. 2025, Demons in the Detail), and because it must not depend on the layout.
transformers' own function averages f and P over the layers first, which balances unrelated experts against each other;
with one layer it is the same, and with several it has the same scale: k where all experts are chosen alike.

The gradient of the balance loss needs f, which is known only when every micro-batch has been through every layer, while
each micro-batch's backward pass should follow its forward pass. So f is given (``RouterLosses.fractions``), either

* of the step before, whose counts ``finish_step`` leaves there: no additional work. The gradient is that of
  E · Σ_e f_e(step before) · P_e, equal in every layout. f and P then are of different samples, which makes it an
  unbiased estimate of the gradient over the whole data, up to what one step changes in the router; or
* of this step, by one more forward pass of all micro-batches without gradients (``RouterLosses.counting``): exact, for
  a quarter (with full activation checkpointing) to a third more work.

Megatron-Core instead takes the counts of the micro-batches seen so far in the step, which depends on their number.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.models.routers import Router, experts_of, router_classes, within_capacity

SUMS = 4
"""Columns of the totals after counts (E) and probabilities (E): tokens, z loss, entropy, dropped pairs."""


@dataclass(frozen=True)
class RouterReport:
    """What the routers did in a step, over the global batch. Tensors on the device; (layers,) unless said otherwise."""

    balance: Tensor
    """The balance loss, a scalar, not multiplied by its coefficient; k where all experts are chosen alike."""
    z: Tensor
    """The z loss, a scalar, not multiplied by its coefficient."""
    load: Tensor
    """Tokens of the busiest expert over the mean of all experts: from 1 to E / k."""
    entropy: Tensor
    """Of a token's probabilities over the experts, in nats, averaged over tokens; at most log E."""
    dropped: Tensor
    """Share of (token, chosen expert) pairs that were over capacity."""


class RouterLosses:
    """Adds the gradients of the routers' losses to every backward pass, and counts what is routed.

    The gradients enter at the routers themselves, so the model's output, activation checkpointing and pipeline stages
    are as without them. Both happen in the backward pass, once for each micro-batch, also where a forward pass is
    recomputed. A step is: ``begin_step``; forward and backward passes, which give the model the keyword
    ``routed_tokens`` (B, L), nonzero for tokens that count; ``take_totals``; their sum over all ranks; ``finish_step``.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        device: torch.device,
        *,
        balance: float,
        z: float = 0.0,
        capacity: float | None = None,
    ) -> None:
        """``routers``, at least one, of the whole model, whatever parts of it this rank has.

        ``balance`` and ``z`` are the losses' coefficients; ``capacity`` is ``within_capacity``'s factor, None for no
        limit.
        """
        self._routers = list(routers)
        self._balance = balance
        self._z = z
        self._capacity = capacity
        self._tokens: Tensor | None = None
        self._counting = False
        self._numbers = torch.tensor([router.experts for router in routers], dtype=torch.float64, device=device)
        self._most = max(router.experts for router in routers)
        shape = (len(routers), 2 * self._most + SUMS)
        self._totals = torch.zeros(shape, dtype=torch.float64, device=device)
        self._scale = torch.ones((), device=device)
        self.fractions = torch.zeros(len(routers), self._most, device=device)
        """f, float32 (layers, E). Zero before the first step, so that the balance loss has no gradient in it."""

    def attach(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Change the routers that are in ``model`` (all of it, or a stage), and the ``blocks`` around them, in place.

        To be called before activation checkpointing and compilation.
        """
        modules: dict[str, Any] = dict(model.named_modules())
        classes = router_classes(model)
        for layer, router in enumerate(self._routers):
            module = modules.get(router.name)
            if not isinstance(module, classes):
                continue  # another stage has it
            module.forward = self._routing(module.forward, layer)
            if self._capacity is not None:
                # The library's forward then passes over pairs without an expert.
                modules[experts_of(router.name)]._is_expert_parallel = True
        for block in blocks:
            if any(isinstance(module, classes) for module in block.modules()):
                block.forward = self._taking_tokens(block.forward)

    # In the model

    def _taking_tokens(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that keeps ``routed_tokens`` for the router within.

        As the block's argument they are of the right micro-batch also when the block is recomputed.
        """

        @functools.wraps(forward)
        def forward_with_tokens(*arguments: Any, routed_tokens: Tensor | None = None, **keywords: Any) -> Any:
            self._tokens = routed_tokens
            return forward(*arguments, **keywords)

        return forward_with_tokens

    def _routing(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        @functools.wraps(forward)
        def routing(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = forward(*arguments, **keywords)
            tokens = self._tokens
            if tokens is None:
                if torch.is_grad_enabled() or self._counting:
                    raise RuntimeError("the keyword routed_tokens did not reach the blocks of the model")
                return logits, weights, chosen
            counted = tokens.flatten().float()
            if self._counting:
                self._count(layer, chosen, counted)
            kept = None
            if self._capacity is not None:
                kept = within_capacity(weights.detach(), chosen, tokens, logits.shape[-1], self._capacity)
            weights = _WithLosses.apply(weights, logits, chosen, counted, kept, self, layer)  # type: ignore[no-untyped-call]
            if kept is not None:
                weights, chosen = weights.masked_fill(~kept, 0), chosen.masked_fill(~kept, logits.shape[-1])
            return logits, weights, chosen

        # It counts as it goes, which a compiled graph should not; and the experts' exchange is not compiled either.
        return torch.compiler.disable(routing)  # type: ignore[no-any-return]

    def _count(self, layer: int, chosen: Tensor, counted: Tensor) -> None:
        row = self._totals[layer]
        row.scatter_add_(0, chosen.flatten(), counted.double().repeat_interleave(chosen.shape[1]))
        row[-SUMS] += counted.sum()

    def _in_backward(self, layer: int, logits: Tensor, chosen: Tensor, counted: Tensor, kept: Tensor | None) -> Tensor:
        """Count what the router of ``layer`` did, and return the gradient of its losses with respect to its logits."""
        experts = logits.shape[-1]
        logits = logits.float()
        probabilities, size = logits.softmax(-1), logits.logsumexp(-1)
        entropy = size - (probabilities * logits).sum(-1)
        dropped = torch.zeros_like(size) if kept is None else (~kept).sum(1).float()
        self._count(layer, chosen, counted)
        self._totals[layer, self._most : self._most + experts] += counted @ probabilities
        self._totals[layer, 1 - SUMS :] += torch.stack([size.square(), entropy, dropped]) @ counted

        fractions = self.fractions[layer, :experts]
        balance = experts * probabilities * (fractions - (probabilities @ fractions).unsqueeze(1))
        z = 2 * size.unsqueeze(1) * probabilities
        share = counted * (self._scale / len(self.fractions))
        return (self._balance * balance + self._z * z) * share.unsqueeze(1)

    # In the step

    def begin_step(self, scale: Tensor) -> None:
        """``scale``: what makes a sum over the tokens that count a mean over the global batch, before a backward pass.

        That is the number of ranks that FSDP averages over, divided by Σ w over the global batch.
        """
        self._scale = scale.float()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, forward passes without gradients count what is routed: ``take_totals`` has it for ``use``."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def take_totals(self) -> Tensor:
        """This rank's sums since they were last taken, float64 (layers, 2 E + SUMS), to be summed over all ranks.

        Ranks that hold the same tokens (tp) all contribute theirs: only quotients are made of the sums.
        """
        totals, self._totals = self._totals, torch.zeros_like(self._totals)
        return totals

    def use(self, totals: Tensor) -> None:
        """Take f from sums over all ranks."""
        tokens = totals[:, -SUMS].clamp(min=1)
        self.fractions = (totals[:, : self._most] / tokens.unsqueeze(1)).float()

    def finish_step(self, totals: Tensor) -> RouterReport:
        """What the step did, from sums over all ranks, whose f is used from now on."""
        self.use(totals)
        counts, probabilities = totals[:, : self._most], totals[:, self._most : -SUMS]
        tokens, z, entropy, dropped = totals[:, -SUMS:].unbind(1)
        tokens, pairs = tokens.clamp(min=1), counts.sum(1).clamp(min=1)
        balance = self._numbers * (counts * probabilities).sum(1) / tokens.square()
        return RouterReport(
            balance=balance.mean(),
            z=(z / tokens).mean(),
            load=self._numbers * counts.amax(1) / pairs,
            entropy=entropy / tokens,
            dropped=dropped / pairs,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """What the next step needs of this one."""
        return {"fractions": self.fractions}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the ``state_dict`` of the same model in any layout."""
        self.fractions = state["fractions"].to(self.fractions)


class _WithLosses(torch.autograd.Function):
    """The weights as they are; their backward pass sends the gradient of the router's losses to its logits."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        weights: Tensor,
        logits: Tensor,
        chosen: Tensor,
        counted: Tensor,
        kept: Tensor | None,
        losses: RouterLosses,
        layer: int,
    ) -> Tensor:
        ctx.save_for_backward(logits, chosen, counted, kept)
        ctx.losses, ctx.layer = losses, layer
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, *routed = ctx.saved_tensors
        of_logits = ctx.losses._in_backward(ctx.layer, logits, *routed)
        return gradient, of_logits.to(logits.dtype), None, None, None, None, None
