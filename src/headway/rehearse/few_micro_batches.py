"""A rehearsal in which only few of a step's micro-batches pass through the model, in segments that tell of all others.

The rest of the step sees all of them: those that did not pass have a loss without having made one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from headway.parallel import FullyShardedModel
from headway.parallel.one_device import OneDevice
from headway.parallel.pipeline import Pipeline, pipeline
from headway.parallel.pipeline.stage_runner import StageRunner
from headway.rehearse.contexts import Label, fewest
from headway.rehearse.patches import Replacements
from headway.rehearse.recorder import Recorder
from headway.rehearse.understudies import StageEdges
from headway.train.passes import SequentialPasses

WHOLE, LAST = "micro_batch", "last"
"""Kinds of segments without a pipeline: forward and backward of a micro-batch; the last one reduces gradients."""
ABSENT = "absent"
"""Kind of segments that hand back a loss for a micro-batch that did not pass."""


DEPTH = 2
"""Of contexts without a pipeline: what the first micro-batch leaves behind, the second one finds."""


def sequential_order(micro_batches: int) -> list[Label]:
    """Segments of a step without a pipeline."""
    return [(WHOLE, 0, number) for number in range(micro_batches - 1)] + [(LAST, 0, micro_batches - 1)]


@contextmanager
def few_in_turn(recorder: Recorder, number: int) -> Iterator[None]:
    """Of ``number`` micro-batches without a pipeline as few pass as are enough."""
    few = len(fewest(sequential_order(number), DEPTH))
    chosen = [*range(few - 1), number - 1]
    replaced, gradients = Replacements(), SequentialPasses.gradients
    segments = _Segments(recorder, chosen)
    for model in (FullyShardedModel, OneDevice):
        replaced.before(model, "begin_micro_batch", segments.begin)

    def passed(self: SequentialPasses, batches: list[Any], scale: Tensor) -> list[Tensor]:
        found = dict(zip(chosen, gradients(self, [batches[m] for m in chosen], scale), strict=True))
        segments.end(found)
        return [found[m] if m in found else _loss_of_absent(recorder, 0, m) for m in range(number)]

    replaced.put(SequentialPasses, "gradients", passed)
    try:
        yield
    finally:
        replaced.close()


class _Segments:
    """One for each micro-batch, from where it begins to where the next one does."""

    def __init__(self, recorder: Recorder, chosen: list[int]) -> None:
        self._recorder = recorder
        self._chosen = chosen
        self._starts: list[tuple[int, int]] = []

    def begin(self, *_: Any, **__: Any) -> None:
        self._recorder.where.micro_batch = self._chosen[len(self._starts)]
        self._starts.append(self._now())

    def _now(self) -> tuple[int, int]:
        return len(self._recorder.operators), self._recorder.storages.moment()[1]

    def end(self, losses: dict[int, Tensor]) -> None:
        places = [*self._starts, self._now()]
        for place, micro_batch in enumerate(self._chosen):
            (first, first_event), (stop, stop_event) = places[place : place + 2]
            kind = LAST if place == len(self._chosen) - 1 else WHOLE
            gives = (self._recorder.storages.serial(losses[micro_batch]),)
            self._recorder.add_segment(kind, 0, micro_batch, first, stop, first_event, stop_event, gives)


def _loss_of_absent(recorder: Recorder, stage: int, micro_batch: int) -> Tensor:
    with recorder.segment(ABSENT, stage, micro_batch) as gives:
        loss = torch.empty(())
        gives.append(loss)
    return loss


@contextmanager
def few_through_stages(
    recorder: Recorder,
    objective: Any,
    orders: dict[int, list[Label]],
    tell: Callable[[list[StageEdges]], None],
) -> Iterator[None]:
    """A pipeline's stages on this rank go through ``orders``, one stage after the other, in place of a schedule's.

    ``objective``: the class of what prepares micro-batches. ``tell`` is told what the stages are to their neighbours.
    """
    replaced = Replacements()
    forward_backward = Pipeline.forward_backward

    def scheduled(runners: list[StageRunner], micro_batches: int, plan: Any, loss: Any) -> "_InTurn":
        return _InTurn(recorder, runners, orders, loss, tell)

    def passed(self: Pipeline, batches: list[Any], scale: Any) -> list[Tensor]:
        losses = forward_backward(self, batches, scale)
        if not self.has_last_stage:
            return losses
        absent = self._training[len(batches)].absent
        return losses + absent

    numbers = count()
    replaced.around(objective, "prepare", lambda *_: recorder.segment("prepare", -1, next(numbers)))
    replaced.put(pipeline, "training_schedule", scheduled)
    replaced.put(Pipeline, "forward_backward", passed)
    try:
        yield
    finally:
        replaced.close()


class _InTurn:
    """Has a schedule's method that takes a step's micro-batches through the stages."""

    def __init__(
        self,
        recorder: Recorder,
        runners: list[StageRunner],
        orders: dict[int, list[Label]],
        loss: Callable[[Tensor, Any], Tensor],
        tell: Callable[[list[StageEdges]], None],
    ) -> None:
        self.absent: list[Tensor] = []
        self._recorder = recorder
        self._runners = runners
        self._orders = orders
        self._loss = loss
        self._tell = tell
        self._handles: list[Any] = []
        self._losses: dict[int, Tensor] = {}

    def _step_microbatches(self, kwarg_mbs: list[dict[str, Any]], target_mbs: list[Any], return_outputs: bool) -> None:
        self._tell([_edges(runner) for runner in self._runners])
        for runner in self._runners:
            for kind, _, number in self._orders[runner.stage_index]:
                self._recorder.mark()
                batch = kwarg_mbs[number]["batch"] if number >= 0 else None
                self._act(runner, kind, number, batch)
            if runner.is_last:
                done = sum(kind == "loss" for kind, _, _ in self._orders[runner.stage_index])
                stage = runner.stage_index
                self.absent = [_loss_of_absent(self._recorder, stage, m) for m in range(done, len(kwarg_mbs))]
        self._recorder.mark()

    def _act(self, runner: StageRunner, kind: str, number: int, batch: Any) -> None:
        match kind:
            case "forward":
                self._forward(runner, number, batch)
            case "loss":
                self._lose(runner, number, batch)
            case "backward" | "backward_input":
                self._backward(runner, kind, number)
            case "backward_weight":
                with self._segment(kind, runner, number):
                    runner.backward_weight_one_chunk(number)
            case "reduce":
                with self._segment(kind, runner, -1):
                    runner.perform_reduce_grad(1)
            case "gather":
                with self._segment(kind, runner, -1):
                    self._handles = [unit.unshard(async_op=True) for unit in _units(runner)]
            case "gathered":
                with self._segment(kind, runner, -1):
                    for handle in self._handles:
                        handle.wait()
                    self._handles = []
            case "free":
                with self._segment(kind, runner, -1):
                    for unit in _units(runner):
                        unit.reshard()

    def _segment(self, kind: str, runner: StageRunner, number: int, *takes: Tensor) -> Any:
        return self._recorder.segment(kind, runner.stage_index, number, takes)

    def _forward(self, runner: StageRunner, number: int, batch: Any) -> None:
        received = [] if runner.is_first else runner._empty(number)
        runner._received[number] = received
        with self._segment("forward", runner, number, *received) as gives:
            del received
            output = runner.forward_one_chunk(number, (), {"batch": batch}, save_forward_output=False)
            gives += [output] if runner.is_last else output
        if runner.is_last:
            self._output = output

    def _lose(self, runner: StageRunner, number: int, batch: Any) -> None:
        output = self.__dict__.pop("_output")
        with self._segment("loss", runner, number, output) as gives:
            scaled = self._loss(output, batch)
            gives += [self._all_losses[-1], scaled]
        self._losses[number] = scaled

    @property
    def _all_losses(self) -> list[Tensor]:
        found: list[Tensor] = self._loss.__self__._losses  # type: ignore[attr-defined]
        return found

    def _backward(self, runner: StageRunner, kind: str, number: int) -> None:
        _, received = runner.fwd_cache[number]
        gradients = [] if runner.is_last or not runner._stage.gradients_out else runner._empty(number)
        runner._gradients[number] = gradients
        with self._segment(kind, runner, number, *received, *gradients) as gives:
            del received, gradients
            loss = self._losses.pop(number) if runner.is_last else None
            runner.backward_one_chunk(number, loss=loss, full_backward=kind == "backward")
            gives += runner.bwd_cache.get(number, ())
        runner.bwd_cache.pop(number, None)


def _edges(runner: StageRunner) -> StageEdges:
    stage = runner._stage
    return StageEdges(stage.index, stage.count, runner._shapes[0], stage.gradients_in, stage.gradients_out)


def _units(runner: StageRunner) -> list[FSDPModule]:
    return [module for module in runner.submod.modules() if isinstance(module, FSDPModule)]
