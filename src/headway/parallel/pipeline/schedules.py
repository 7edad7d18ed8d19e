"""The orders in which a rank's stages run: torch's schedules for training, all forwards in a row without gradients."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from headway.parallel.pipeline.plan import PipelinePlan
from headway.parallel.pipeline.stage_runner import StageRunner


class ForwardOnly(_PipelineScheduleRuntime):
    """Each stage of a rank takes all micro-batches, one stage after the other; for any number of micro-batches."""

    def __init__(self, stages: list[StageRunner], micro_batches: int, plan: PipelinePlan) -> None:
        super().__init__(stages, micro_batches)
        # Backwards complete the order, for torch to accept it; stages without a backward pass do nothing in them.
        self.pipeline_order = {
            rank: [
                _Action(stage, kind, number)
                for kind, order in (
                    (_ComputationType.FORWARD, plan.stages_of(rank)),
                    (_ComputationType.FULL_BACKWARD, plan.stages_of(rank)[::-1]),
                )
                for stage in order
                for number in range(micro_batches)
            ]
            for rank in range(plan.ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def training_schedule(
    runners: list[StageRunner], micro_batches: int, plan: PipelinePlan, loss: Callable[[Tensor, Any], Tensor]
) -> Any:
    """torch's schedule; gradients are those of the sum of ``loss`` over micro-batches, not divided by their number."""
    schedule: Any = get_schedule_class(plan.kind.torch_name)
    stages = runners[0] if issubclass(schedule, PipelineScheduleSingle) else runners
    return schedule(stages, micro_batches, loss_fn=loss, scale_grads=False)
