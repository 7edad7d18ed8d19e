"""Forward and backward passes of a step's micro-batches, one after the other on this rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headway.data import Batch
from headway.parallel import LaidOutWhole
from headway.parallel.pipeline import Pipeline
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
    laid_out: LaidOutWhole
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


@dataclass(frozen=True)
class PipelinedPasses:
    """Each rank of the pipeline has its stages of the model; all work on the same micro-batches."""

    pipeline: Pipeline
    objective: Objective[Any]

    def gradients(self, batches: list[Batch], scale: Tensor) -> list[Tensor]:
        """See Passes. Zeros where the last stage is not."""
        return self.pipeline.forward_backward([self.objective.prepare(batch) for batch in batches], scale)

    @torch.no_grad()
    def losses(self, batches: list[Batch]) -> list[Tensor]:
        """See Passes. Zeros where the last stage is not."""
        return self.pipeline.losses([self.objective.prepare(batch) for batch in batches])

    @torch.no_grad()
    def output(self, predict: Callable[[nn.Module], Tensor]) -> Tensor:
        """See Passes."""
        (output,) = self.pipeline.everywhere(self.pipeline.forward([None], lambda model, _: predict(model)))
        return output
