"""Micro-batches through the stages of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.parallel.pipeline.schedules import ForwardOnly, training_schedule
from headway.parallel.pipeline.split import Predict
from headway.parallel.pipeline.stage_runner import StageRunner, on_this_rank
from headway.parallel.pipeline.staged_model import StagedModel


class Pipeline:
    """Runs a step's micro-batches. Every rank of the pipeline makes the same calls, with the same micro-batches.

    ``predict`` calls the model and returns its output, ``loss`` makes of an output and its micro-batch a float32
    scalar: a sum. ``dtype`` is that of activations between stages. ``sequence_shards``: over how many ranks tokens
    between stages are split beyond what the arguments of the model show (context and sequence parallelism inside it).

    The stages must have been sharded, or be plain modules; then gradients stay on the rank.
    """

    def __init__(
        self,
        staged: StagedModel,
        predict: Predict,
        loss: Callable[[Tensor, Any], Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        sequence_shards: int = 1,
    ) -> None:
        self._staged = staged
        self._plan = staged.split.plan
        self._predict = predict
        self._loss = loss
        self._device = device
        self._dtype = dtype
        self._sequence_shards = sequence_shards
        self._runners = [StageRunner(stage, predict, device, staged.group) for stage in staged.split.stages]
        self._training: dict[int, Any] = {}
        self._forwards: dict[int, ForwardOnly] = {}
        self._scale: Tensor | float = 1.0
        self._losses: list[Tensor] = []

    @property
    def has_last_stage(self) -> bool:
        """Whether outputs and losses come about on this rank."""
        return any(runner.is_last for runner in self._runners)

    def forward_backward(self, batches: list[Any], scale: Tensor | float) -> list[Tensor]:
        """Add the gradients of ``scale`` · Σ loss, reduced over the ranks once.

        Returns each micro-batch's loss where the last stage is, and zeros elsewhere.
        """
        if len(batches) not in self._training:
            self._training[len(batches)] = training_schedule(self._runners, len(batches), self._plan, self._scaled_loss)
        self._scale, self._losses = scale, []
        self._run(self._training[len(batches)], batches, self._predict, trains=True)
        self._staged.add_shared_gradients()
        if self.has_last_stage:
            return self._losses
        return [torch.zeros((), device=self._device) for _ in batches]

    def _scaled_loss(self, output: Tensor, batch: Any) -> Tensor:
        loss = self._loss(output, batch)
        self._losses.append(loss.detach())
        return loss * self._scale

    @torch.no_grad()
    def forward(self, batches: list[Any], predict: Predict | None = None) -> list[Tensor]:
        """Each micro-batch's output where the last stage is, nothing elsewhere; of any number of micro-batches."""
        if len(batches) not in self._forwards:
            self._forwards[len(batches)] = ForwardOnly(self._runners, len(batches), self._plan)
        return self._run(self._forwards[len(batches)], batches, predict or self._predict, trains=False)

    def losses(self, batches: list[Any]) -> list[Tensor]:
        """Each micro-batch's loss without gradients where the last stage is, and zeros elsewhere."""
        outputs = self.forward(batches)
        if self.has_last_stage:
            return [self._loss(output, batch) for output, batch in zip(outputs, batches, strict=True)]
        return [torch.zeros((), device=self._device) for _ in batches]

    def everywhere(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs of ``forward``, on every rank of the pipeline."""
        last = self._plan.rank_of(self._plan.stages - 1)
        group = self._staged.group
        shapes: list[Any] = [[(output.shape, output.dtype) for output in outputs]]
        dist.broadcast_object_list(shapes, group=group, group_src=last)
        if not self.has_last_stage:
            outputs = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes[0]]
        outputs = [output.contiguous() for output in outputs]
        for output in outputs:
            dist.broadcast(output, group=group, group_src=last)
        return outputs

    def _run(self, schedule: Any, batches: list[Any], predict: Predict, trains: bool) -> list[Tensor]:
        """Outputs, where the last stage is and nothing trains."""
        edges = [self._staged.split.edges(predict, batch) for batch in batches]
        shapes = [on_this_rank(edge, self._dtype, self._sequence_shards) for edge in edges]
        for runner in self._runners:
            runner.has_backward = trains
            runner.predict = predict
            runner.expect(shapes)
        try:
            schedule._step_microbatches(
                kwarg_mbs=[{"batch": batch} for batch in batches],
                target_mbs=batches if trains else None,
                return_outputs=not trains,
            )
            return [output for runner in self._runners for output in runner.output_chunks]
        finally:
            for runner in self._runners:
                runner.clear_runtime_states()
