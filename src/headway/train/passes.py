"""Forward and backward passes of a step's micro-batches, one after the other on this rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headway.data import Batch
from headway.parallel import LaidOut
from headway.train.objectives.objective import Objective


class Passes(Protocol):
    """How the micro-batches of a step go through the model."""

    def gradients(self, batches: list[Batch], scale: Tensor) -> list[Tensor]:
        """Add the gradients of ``scale`` · Σ loss; returns each micro-batch's loss sum, as far as this rank knows it.

        Gradients are reduced over the ranks once, with the last micro-batch.
        """

    def losses(self, batches: list[Batch]) -> list[Tensor]:
        """Each micro-batch's loss sum, without gradients."""

    def output(self, predict: Callable[[nn.Module], Tensor]) -> Tensor:
        """What ``predict`` makes of the model, without gradients, on every rank with the same input."""


@dataclass(frozen=True)
class SequentialPasses:
    """The whole model is on this rank, or gathered block by block."""

    model: nn.Module
    laid_out: LaidOut
    objective: Objective[Any]

    def gradients(self, batches: list[Batch], scale: Tensor) -> list[Tensor]:
        """See Passes."""
        losses = []
        for index, batch in enumerate(batches):
            self.laid_out.begin_micro_batch(last=index == len(batches) - 1)
            loss = self.objective.loss(self.model, batch)
            self.laid_out.backward(loss * scale)
            losses.append(loss.detach())
        return losses

    @torch.no_grad()
    def losses(self, batches: list[Batch]) -> list[Tensor]:
        """See Passes."""
        return [self.objective.loss(self.model, batch) for batch in batches]

    @torch.no_grad()
    def output(self, predict: Callable[[nn.Module], Tensor]) -> Tensor:
        """See Passes."""
        return predict(self.model)
