"""What a run of a given layout takes: step time and peak memory with their ranges."""

from dataclasses import dataclass

import numpy as np

from headway.cluster import Cluster
from headway.cost import Estimate
from headway.plan.behaviour import Behaviour
from headway.plan.block_time import Settings
from headway.plan.layout import Column, Layouts
from headway.plan.memory import GIB, Memory, memory
from headway.plan.shape import ModelShape
from headway.plan.step_time import StepTime, step_time


@dataclass(frozen=True)
class Prediction:
    """One element a layout."""

    step: StepTime
    memory: Memory

    @property
    def step_time_s(self) -> Estimate:
        """Seconds of a step, an 80 % range."""
        return self.step.time * 1e-9

    @property
    def peak_memory_gib(self) -> Estimate:
        """GiB allocated on the fullest device, an 80 % range."""
        return self.memory.peak * (1 / GIB)

    def breakdown(self) -> dict[str, Column]:
        """Share of the step of each part."""
        total = self.step.parts.total()
        return {part: np.asarray(time.value / total) for part, time in self.step.parts.times.items()}


def predict(
    cluster: Cluster, shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> Prediction:
    """Time and memory of each layout. Raises UserError where the cluster knows no rate of the precision."""
    return Prediction(
        step_time(cluster, shape, layouts, settings, behaviour), memory(shape, layouts, settings, behaviour)
    )
