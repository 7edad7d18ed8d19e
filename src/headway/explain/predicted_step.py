"""A run's measured steps beside the step that was predicted of it: by what they became longer, and in which blocks."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.explain.collectives import align, collectives_of
from headway.explain.health import repaired
from headway.explain.idle import DEVICE_WAIT, HOST, UNKNOWN_CAUSE
from headway.explain.rank_trace import RankTrace
from headway.explain.rank_view import RankView
from headway.timeline import DEVICE_KINDS, Intervals, Kind, Timeline, attributed_ns

OUTSIDE = "outside of blocks"
WAITING = "waiting for other ranks and the pipeline"
REST = "optimizer, norms and the rest"
_MESSAGES = ("send", "recv")
"""A stage that waits for a message waits for the pipeline: a prediction has messages from when both ends are there."""
NAMED_SHARE = 0.8
"""Of a change, that the blocks which are named for it hold."""
TOLD, TOLD_SHARE = 3, 0.02
"""Causes in the sentence that says it all, and the share of the step that their change must be."""

Shares = dict[tuple[str, str], float]
"""us a step by cause and block; together they are the step."""


@dataclass(frozen=True)
class PlannedCause:
    """What one cause takes of a step, as it was predicted and as it was measured, us."""

    name: str
    planned_us: float
    measured_us: float
    blocks: Mapping[str, float]
    """Change by block, us; their sum is the cause's."""

    @property
    def change_us(self) -> float:
        """Longer than predicted by this; negative: shorter."""
        return self.measured_us - self.planned_us

    @property
    def where(self) -> str:
        """The blocks that hold most of the change: ``blocks 12-15``; "" where it lies everywhere or outside of them."""
        return _most_of(self.blocks, self.change_us)


@dataclass(frozen=True)
class PlannedStep:
    """The difference of a predicted step and of measured ones, the mean of the ranks that both have."""

    ranks: tuple[int, ...]
    steps: int
    """Measured ones that are whole."""
    causes: tuple[PlannedCause, ...]
    """The largest change first."""
    waits_apart: bool
    """Waiting for other ranks was taken out of the measured collectives, as it is no part of predicted ones."""

    @property
    def planned_us(self) -> float:
        """The predicted step."""
        return sum(cause.planned_us for cause in self.causes)

    @property
    def measured_us(self) -> float:
        """A measured step, the mean."""
        return sum(cause.measured_us for cause in self.causes)

    @property
    def text(self) -> str:
        """One sentence: ``planned 612 ms, measured 702 ms: +71 ms exposed all gather (dp_shard) in blocks 12-15``."""
        told = [
            f"{cause.change_us / 1000:+,.3g} ms {cause.name}" + (f" in {cause.where}" if cause.where else "")
            for cause in self.causes[:TOLD]
            if abs(cause.change_us) > TOLD_SHARE * self.planned_us
        ]
        whole = f"planned {self.planned_us / 1000:,.4g} ms, measured {self.measured_us / 1000:,.4g} ms"
        return f"{whole}: {', '.join(told)}" if told else whole

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ranks": list(self.ranks),
            "steps": self.steps,
            "planned_us": self.planned_us,
            "measured_us": self.measured_us,
            "waits_apart": self.waits_apart,
            "text": self.text,
            "causes": [
                {
                    "cause": cause.name,
                    "planned_us": cause.planned_us,
                    "measured_us": cause.measured_us,
                    "change_us": cause.change_us,
                    "where": cause.where,
                    "blocks_us": dict(cause.blocks),
                }
                for cause in self.causes
            ],
        }


def beside_prediction(predicted: Timeline, step_us: float, traces: Sequence[RankTrace]) -> PlannedStep | None:
    """Hold the measured steps of ``traces`` against the step ``predicted``, which takes ``step_us``.

    None when no rank is in both, or no trace has a step.
    """
    views = [view for view in map(_view, traces) if view is not None and view.steps]
    waits_apart = len(views) > 1
    if waits_apart:
        views = _without_waiting(views)
    both = [view for view in views if view.trace.rank in predicted.ranks()]
    if not both:
        return None
    planned, measured = [], []
    for view in both:
        rank = view.trace.rank
        planned.append(_shares(RankView(RankTrace("", rank, predicted.of_rank(rank))), (0, round(1000 * step_us)), 1))
        window, steps = _whole_steps(view)
        measured.append(_shares(view, window, steps))
    return PlannedStep(
        ranks=tuple(view.trace.rank for view in both),
        steps=min(_whole_steps(view)[1] for view in both),
        causes=tuple(_causes(_mean(planned), _mean(measured))),
        waits_apart=waits_apart,
    )


def _view(trace: RankTrace) -> RankView | None:
    sound = repaired(trace).trace
    return RankView(sound) if sound.timeline.kinds(*DEVICE_KINDS).any() else None


def _whole_steps(view: RankView) -> tuple[tuple[int, int], int]:
    """From the first step's begin to that of the last, and how many steps these are; of one step all that is there."""
    steps = view.steps[:-1] or view.steps
    return (steps[0].window[0], steps[-1].window[1]), len(steps)


def _without_waiting(views: Sequence[RankView]) -> list[RankView]:
    """The same with collectives from when the last rank had come, as far as they can be laid beside each other."""
    begins = {view.trace.rank: view.timeline.start_ns.copy() for view in views}
    for aligned in align([collectives_of(view.timeline, view.trace.rank) for view in views]):
        for column, rank in enumerate(aligned.ranks):
            arrival = aligned.last_arrival_ns + int(aligned.offset_ns[column])
            begins[rank][aligned.span[:, column]] = arrival
    changed = []
    for view in views:
        timeline = view.timeline
        start = np.clip(begins[view.trace.rank], timeline.start_ns, timeline.end_ns)
        cut = replace(timeline, start_ns=start, duration_ns=timeline.end_ns - start)
        changed.append(RankView(replace(view.trace, timeline=cut)))
    return changed


def _shares(view: RankView, window: tuple[int, int], steps: int) -> Shares:
    """Of one rank: what the device does by kind, phase and axis, and why it is idle."""
    timeline = view.timeline
    found: Shares = defaultdict(float)
    idle = timeline.intervals(timeline.kinds(*DEVICE_KINDS)).gaps_in(*window)
    by_cause = dict(view.idle.by_cause)
    spent = attributed_ns(timeline, window)
    if view.computes_on_host:
        spent = spent + _python_before(view, idle & by_cause.pop(HOST))
    counted = np.flatnonzero(spent > 0)
    columns = np.stack([timeline.kind[counted], *(getattr(timeline, name)[counted] for name in _GROUPED)])
    keys, where = np.unique(columns, axis=1, return_inverse=True)
    sums = np.bincount(where.ravel(), weights=spent[counted].astype(float), minlength=keys.shape[1])
    for (kind, *places), nanoseconds in zip(keys.T.tolist(), sums.tolist(), strict=True):
        phase, axis, collective, module = (timeline.strings[place] for place in places)
        found[_cause(Kind(kind), phase, axis, collective), block_of(module)] += nanoseconds / steps / 1000
    unlaunched = not (view.launches >= 0).any()
    causes = {cause: (during & idle).total_ns() for cause, during in by_cause.items()}
    # Before the first span of the device and after the last it waits for the host.
    causes[HOST] = window[1] - window[0] - int(spent.sum()) - sum(ns for name, ns in causes.items() if name != HOST)
    for cause, nanoseconds in causes.items():
        known = HOST if cause == UNKNOWN_CAUSE and unlaunched else cause
        found[_IDLE.get(known, f"idle: {known.replace('_', ' ')}"), OUTSIDE] += nanoseconds / steps / 1000
    return {key: value for key, value in found.items() if value}


def _python_before(view: RankView, idle: Intervals) -> NDArray[np.int64]:
    """Of each span of a CPU, the idle time of the host that ends with it: int64, ``[spans]``.

    A cluster's times of operators on CPUs are measured with what Python and the dispatcher take before each.
    """
    spent = np.zeros(len(view.timeline), dtype=np.int64)
    starts = view.timeline.start_ns[view.device]
    after = np.searchsorted(starts, idle.ends)
    known = after < len(starts)
    np.add.at(spent, view.device[after[known]], (idle.ends - idle.starts)[known])
    return spent


_GROUPED = ("phase", "axis", "collective", "module")
_IDLE = {DEVICE_WAIT: WAITING, HOST: "host between operators"}


def _cause(kind: Kind, phase: str, axis: str, collective: str) -> str:
    if kind is Kind.MEMORY:
        return "copies"
    if kind is Kind.COMMUNICATION:
        if collective in _MESSAGES:
            return WAITING
        where = f" ({axis})" if axis else ""
        return f"exposed {collective.replace('_', ' ') or 'communication'}{where}"
    return phase if phase in ("forward", "backward", "recompute") else REST


def block_of(module: str) -> str:
    """The repeated block that a module is in: its path up to the first number; else that of its head."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return module or OUTSIDE


def _mean(shares: Sequence[Shares]) -> Shares:
    keys = dict.fromkeys(key for one in shares for key in one)
    return {key: sum(one.get(key, 0.0) for one in shares) / len(shares) for key in keys}


def _causes(planned: Shares, measured: Shares) -> list[PlannedCause]:
    names = dict.fromkeys(cause for cause, _ in (*planned, *measured))
    found = []
    for name in names:
        blocks = dict.fromkeys(block for cause, block in (*planned, *measured) if cause == name)
        changes = {block: measured.get((name, block), 0.0) - planned.get((name, block), 0.0) for block in blocks}
        found.append(
            PlannedCause(
                name,
                sum(us for (cause, _), us in planned.items() if cause == name),
                sum(us for (cause, _), us in measured.items() if cause == name),
                dict(sorted(changes.items(), key=lambda one: -abs(one[1]))),
            )
        )
    return sorted(found, key=lambda cause: -abs(cause.change_us))


_NUMBERED = re.compile(r"(.*)\.(\d+)$")


def _most_of(blocks: Mapping[str, float], change: float) -> str:
    """Names of the blocks that hold ``NAMED_SHARE`` of a change, numbers as ranges; "" when that is most of them."""
    inside = {block: us for block, us in blocks.items() if block != OUTSIDE and us * change > 0}
    chosen: list[str] = []
    for block in sorted(inside, key=lambda block: -abs(inside[block])):
        if sum(inside[one] for one in chosen) / change >= NAMED_SHARE:
            break
        chosen.append(block)
    if not chosen or sum(inside[one] for one in chosen) / change < NAMED_SHARE / 2 or 2 * len(chosen) > len(blocks) > 3:
        return ""
    numbers: dict[str, list[int]] = defaultdict(list)
    named = []
    for block in chosen:
        if found := _NUMBERED.match(block):
            numbers[found[1]].append(int(found[2]))
        else:
            named.append(block)
    return ", ".join([f"{stem} {_ranges(sorted(places))}" for stem, places in numbers.items()] + named[:3])


def _ranges(numbers: Sequence[int]) -> str:
    """``3, 12-15``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
