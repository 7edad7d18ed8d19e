"""One rank's Timeline with what every analysis asks of it, worked out once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headway.explain.idle import Idle, idle_by_cause
from headway.explain.rank_trace import RankTrace
from headway.explain.replay import Graph, graph_of
from headway.timeline import (
    DEVICE_KINDS,
    UNKNOWN,
    Breakdown,
    Intervals,
    Kind,
    Timeline,
    breakdown_of,
    launches_of,
    run_facts,
)
from headway.timeline.intervals import Mask

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One training step as the device saw it."""

    number: int
    window: tuple[int, int]
    """From its first device span to the first of the next step, or to the end of the trace; ns."""


@dataclass(frozen=True, eq=False)
class RankView:
    """A :class:`RankTrace` under analysis. Only for a trace that has device spans."""

    trace: RankTrace

    @property
    def timeline(self) -> Timeline:
        """The rank's spans."""
        return self.trace.timeline

    @property
    def computes_on_host(self) -> bool:
        """The run is one on CPUs: what is launched and what launches it are the same thread's."""
        return run_facts(self.trace.facts).get("device") == "cpu"

    @cached_property
    def device(self) -> Integers:
        """Places of the device's spans, by start."""
        places = np.flatnonzero(self.timeline.kinds(*DEVICE_KINDS))
        return places[np.argsort(self.timeline.start_ns[places], kind="stable")]

    @cached_property
    def launches(self) -> Integers:
        """For each span the place of the call that launched it, -1 for none."""
        return launches_of(self.timeline)

    @cached_property
    def window(self) -> tuple[int, int]:
        """First start and last end of the device's spans, ns."""
        return self.timeline.window(self.device)

    @property
    def window_us(self) -> float:
        """Length of the window."""
        return (self.window[1] - self.window[0]) / 1000

    @cached_property
    def whole(self) -> Breakdown:
        """The breakdown of the window."""
        return self.within(self.window)

    def within(self, window: tuple[int, int]) -> Breakdown:
        """The breakdown of a part of the window, ns."""
        return breakdown_of(self.compute, self.communication, self.memory, window)

    @cached_property
    def compute(self) -> Intervals:
        """When anything computes."""
        return self.timeline.intervals(self.timeline.kinds(Kind.COMPUTE))

    @cached_property
    def communication(self) -> Intervals:
        """When anything communicates."""
        return self.timeline.intervals(self.timeline.kinds(Kind.COMMUNICATION))

    @cached_property
    def memory(self) -> Intervals:
        """When anything is copied or filled."""
        return self.timeline.intervals(self.timeline.kinds(Kind.MEMORY))

    @cached_property
    def idle(self) -> Idle:
        """Idle time by cause."""
        return idle_by_cause(self.timeline, self.launches, self.window)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The training steps that have device work, in order; none when the trace marks no steps."""
        step = self.timeline.step[self.device]
        numbers, first = np.unique(step, return_index=True)
        starts = self.timeline.start_ns[self.device[first]][numbers != UNKNOWN]
        numbers = numbers[numbers != UNKNOWN]
        order = np.argsort(starts, kind="stable")
        bounds = [*starts[order].tolist(), self.window[1]]
        return tuple(
            Step(number, (begin, end))
            for number, begin, end in zip(numbers[order].tolist(), bounds[:-1], bounds[1:], strict=True)
        )

    @property
    def step_count(self) -> int:
        """How many steps are told, at least 1."""
        return max(len(self.steps), 1)

    def us_range(self, spans: Integers | Mask) -> tuple[float | None, float | None]:
        """First start and last end of spans, us; None of none."""
        if not len(self.timeline.start_ns[spans]):
            return None, None
        begin, end = self.timeline.window(spans)
        return begin / 1000, end / 1000

    @cached_property
    def graph(self) -> Graph:
        """The dependency graph for replays."""
        return graph_of(self.timeline, self.launches, self.device, tuple(step.window for step in self.steps))
