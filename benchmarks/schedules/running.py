"""A step of the Trainer over a real pipeline, each piece of work padded to the same length, as a Timeline.

A stage's forward, and the two halves of its backward pass (gradients of inputs, gradients of weights), last one unit
each, a whole backward pass two, where a rank has one stage, and half of that where it has two. The rest of the time
that a piece of work gets, the rank sleeps: so the ranks do not disturb each other on a machine with fewer cores than
ranks, and what is seen is the order of the schedule with the waiting that its transfers enforce.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from communication.observation import pipeline_of, trainer_of
from headway.check.ranks import Place, joined, run_on_ranks
from headway.recipe import Recipe
from headway.timeline import Kind, Timeline
from headway.train import training_loader

TIMEOUT_S = 180.0


class Span(NamedTuple):
    """One piece of work."""

    rank: int
    stage: int
    micro_batch: int
    phase: str
    """forward, backward, backward_input or backward_weight."""
    start_ns: int
    duration_ns: int
    action: int
    """Of the rank's schedule. A forward and a backward may be one: what either needs is awaited before both, and what
    either makes is sent after both."""


def run_schedule(recipe: Recipe, ranks: int, unit_ns: int) -> list[Span]:
    """The spans of all ranks in the second step, which begins at 0."""
    found = run_on_ranks(ranks, _on_rank, recipe, unit_ns, timeout_s=TIMEOUT_S)
    spans = sorted(span for own in found for span in own)
    origin = min(span.start_ns for span in spans)
    return [span._replace(start_ns=span.start_ns - origin) for span in spans]


def _on_rank(place: Place, recipe: Recipe, unit_ns: int) -> list[Span]:
    with joined(place):
        trainer = trainer_of(recipe)
        first, second = training_loader(trainer.recipe, trainer.parts, range(2))
        trainer.step(first)
        spans: list[Span] = []
        pipeline = pipeline_of(trainer.parts)
        for runner in pipeline._runners:
            _pad(runner, place.rank, unit_ns // len(pipeline._runners), spans)
        trainer.step(second)
        (schedule,) = pipeline._training.values()
        return _numbered(spans, _overlapped(schedule, place.rank))


def _overlapped(schedule: Any, rank: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(stage, micro-batch) of a forward -> of the backward that is one action with it."""
    if not isinstance(schedule, PipelineScheduleMulti):
        return {}
    pairs = [action.sub_actions for action in schedule.pipeline_order[rank] if action and action.sub_actions]
    return {(f.stage_index, f.microbatch_index): (b.stage_index, b.microbatch_index) for f, b in pairs}


def _numbered(spans: list[Span], overlapped: dict[tuple[int, int], tuple[int, int]]) -> list[Span]:
    """The spans, which are in order, with the numbers of their actions."""
    numbered: list[Span] = []
    for span in spans:
        before = numbered[-1] if numbered else span._replace(action=-1)
        joined = before.phase == "forward" and span.phase == "backward"
        joined = joined and overlapped.get((before.stage, before.micro_batch)) == (span.stage, span.micro_batch)
        numbered.append(span._replace(action=before.action + (not joined)))
    return numbered


def _pad(runner: Any, rank: int, unit_ns: int, spans: list[Span]) -> None:
    def padded(work: Any, phase_of: Callable[..., tuple[str, int]], number: int, *arguments: Any, **named: Any) -> Any:
        phase, units = phase_of(**named)
        began = time.monotonic_ns()
        result = work(number, *arguments, **named)
        while (left := began + units * unit_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        if units:
            spans.append(Span(rank, runner.stage_index, number, phase, began, time.monotonic_ns() - began, 0))
        return result

    # The first stage has no gradients of inputs to send: all of its backward pass waits, as in torch's own stages.
    def backward(full_backward: bool = True, **keywords: Any) -> tuple[str, int]:
        return ("backward", 2) if full_backward else ("backward_input", 0 if runner.is_first else 1)

    def weight(**keywords: Any) -> tuple[str, int]:
        return ("backward", 2) if runner.is_first else ("backward_weight", 1)

    runner.forward_one_chunk = functools.partial(padded, runner.forward_one_chunk, lambda **keywords: ("forward", 1))
    runner.backward_one_chunk = functools.partial(padded, runner.backward_one_chunk, backward)
    runner.backward_weight_one_chunk = functools.partial(padded, runner.backward_weight_one_chunk, weight)


def timeline_of(spans: list[Span]) -> Timeline:
    """Lanes are stages, names micro-batches."""
    return Timeline.of(
        kind=Kind.COMPUTE,
        start_ns=[span.start_ns for span in spans],
        duration_ns=[span.duration_ns for span in spans],
        lane=[f"stage {span.stage}" for span in spans],
        name=[f"micro-batch {span.micro_batch}" for span in spans],
        phase=[span.phase for span in spans],
        rank=[span.rank for span in spans],
    )
