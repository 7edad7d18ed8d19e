"""From the records of a step to its times on a cluster: slowed compute, shared links, and the range of the whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.rehearse.columns import Flags, Integers
from headway.rehearse.durations import BESIDE, HOST, Column
from headway.rehearse.play import Load, Played, load_of, operator_times, play
from headway.rehearse.program import Program
from headway.timeline import Intervals

LEFT_OUT = 0.06
"""What no source of errors of the model explains: times of one recipe on the same hardware move by 5.7 % (median)
between releases of the software."""
NEGLIGIBLE = 1e-3
"""A source of errors whose ends lie closer than this share of the step is not played."""


@dataclass(frozen=True)
class Ranged:
    """A number and the range that should hold four of five measurements."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Ranged":
        """All three times ``factor``."""
        return Ranged(self.value * factor, self.low * factor, self.high * factor)

    def as_json(self) -> dict[str, float]:
        """As commands write it."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class RankTimes:
    """When one rank does what, in ns from the beginning of the step."""

    program: Program
    start_ns: Integers
    """int64, ``[operators]``; of a collective: when all its ranks had arrived."""
    end_ns: Integers
    issued_ns: Integers
    """When the host had launched it."""
    epochs_ns: tuple[int, ...]
    """When the host went on after each of its waits; the first is 0."""
    host_end_ns: int

    @property
    def end_of_step_ns(self) -> int:
        """When both the device and the host are done."""
        return max(self.host_end_ns, int(self.end_ns.max(initial=0)))


@dataclass(frozen=True)
class Simulation:
    """A step of one rank of each pipeline stage."""

    ranks: tuple[RankTimes, ...]
    step_ns: int
    range_ns: Ranged
    """Of the step."""
    errors_ns: dict[str, tuple[float, float]]
    """By source, how much shorter and longer the step is at the ends of its range; both are 0 or more."""


def simulate(programs: Sequence[Program], *, ranges: bool = True) -> Simulation:
    """Play ``programs``, one of each pipeline place (one in all without a pipeline), in the order of the pipeline.

    ``ranges``: False leaves the range at the value and takes a fraction of the time. Raises ValueError when the
    programs are not of one step.
    """
    given, wanted = [program.place for program in programs], list(range(programs[0].facts.sizes.get("pp", 1)))
    if given != wanted:
        raise ValueError(f"programs of pipeline places {wanted} are needed, these are of {given}")
    alone = _play(programs, [program.durations.value for program in programs])
    added = [_beside(program, *times[:2]) for program, _, times in alone]
    values = [program.durations.value + more for program, more in zip(programs, added, strict=True)]
    final = _play(programs, values)
    ranks = tuple(RankTimes(program, *times, tuple(played.epoch), played.host_end) for program, played, times in final)
    step = max(rank.end_of_step_ns for rank in ranks)
    errors = _errors(programs, values, added, step) if ranges else {}
    down, up = (math.hypot(*(ends[side] for ends in errors.values())) for side in (0, 1))
    return Simulation(ranks, step, Ranged(float(step), max(step - down, 0.0), step + up), errors)


Times = tuple[Integers, Integers, Integers]


def _play(programs: Sequence[Program], durations: list[Column]) -> list[tuple[Program, Played, Times]]:
    loads, played = _played(programs, durations, [float(program.durations.launch.value) for program in programs])
    return [
        (program, result, operator_times(program, load, result))
        for program, load, result in zip(programs, loads, played, strict=True)
    ]


def _played(
    programs: Sequence[Program], durations: list[Column], launches: list[float]
) -> tuple[list[Load], list[Played]]:
    loads = [
        load_of(program, np.rint(times).astype(np.int64), launch)
        for program, times, launch in zip(programs, durations, launches, strict=True)
    ]
    return loads, play(programs, loads)


def _beside(program: Program, start: Integers, end: Integers) -> Column:
    """What each operator takes longer for what runs beside it, in ns, from times at which nothing did: float64.

    Compute is slower while a collective runs; a collective is slower while one of another group uses its level of
    links. One round is enough: both are small beside the times themselves.
    """
    known, talks = program.durations, program.columns.communicates
    added = np.zeros(len(start))
    if not talks.any():
        return added
    talking = Intervals.union_of(start[talks], end[talks])
    added[~talks] = float(known.slowdown.value) * talking.covered_ns(start[~talks], end[~talks])
    for level in np.unique(known.level[talks]).tolist():
        on_level = talks & (known.level == level)
        groups = np.unique(program.columns.group[on_level]).tolist()
        for group in groups if len(groups) > 1 else []:
            own: Flags = on_level & (program.columns.group == group)
            others = on_level & ~own
            theirs = Intervals.union_of(start[others], end[others])
            added[own] = known.sharing[own] * theirs.covered_ns(start[own], end[own])
    return added


def _errors(
    programs: Sequence[Program], values: list[Column], added: list[Column], step: int
) -> dict[str, tuple[float, float]]:
    """How much shorter and longer the step is when all times of one source are at the ends of their ranges."""
    errors = {"what the model leaves out": (LEFT_OUT * step, LEFT_OUT * step)}
    for place, source in enumerate(programs[0].durations.sources):
        changes = [
            [_change(program, place, more, end) for program, more in zip(programs, added, strict=True)]
            for end in ("low", "high")
        ]
        launches = [
            [float(getattr(program.durations.launch, end if source == HOST else "value")) for program in programs]
            for end in ("low", "high")
        ]
        if source != HOST and max(float(np.abs(one).sum()) for end in changes for one in end) < NEGLIGIBLE * step:
            continue
        steps = []
        for change, launch in zip(changes, launches, strict=True):
            times = [value + more for value, more in zip(values, change, strict=True)]
            loads, played = _played(programs, times, launch)
            steps.append(max(_end(load, one) for load, one in zip(loads, played, strict=True)))
        errors[source] = (float(max(step - steps[0], 0)), float(max(steps[1] - step, 0)))
    return errors


def _change(program: Program, source: int, added: Column, end: str) -> NDArray[np.float64]:
    """By how much the times of one source differ at an end of their range."""
    known = program.durations
    if known.sources[source] == BESIDE:
        rate = float(known.slowdown.value)
        share = (float(getattr(known.slowdown, end)) - rate) / rate if rate else 0.0
        return np.where(program.columns.communicates, 0.0, added * share)
    return np.where(known.source == source, getattr(known, end) - known.value, 0.0)


def _end(load: Load, played: Played) -> int:
    return max(played.host_end, max(played.end, default=0))
