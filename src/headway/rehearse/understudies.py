"""The order in which a pipeline's schedule takes the stages of one rank, with all messages, without a model.

torch's schedule runs for the real number of micro-batches, and stages that compute nothing stand in for this rank's.
What it does with what they hand to it is recorded: memory for messages, sends, receives, and what is waited for when.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from headway.parallel import Meshes
from headway.parallel.pipeline import PipelinePlan, Stage
from headway.parallel.pipeline.schedules import training_schedule
from headway.parallel.pipeline.stage_runner import StageRunner, TensorShape
from headway.parallel.pipeline.stand_ins import Passage
from headway.recipe import Recipe
from headway.rehearse.collectives import Groups
from headway.rehearse.fake_program import FakeValues, fake_ranks
from headway.rehearse.patches import recording
from headway.rehearse.record import Facts, Record
from headway.rehearse.recorder import Recorder
from headway.rehearse.streams import Device
from headway.rehearse.whereabouts import Whereabouts


@dataclass(frozen=True)
class StageEdges:
    """A stage as its neighbours see it."""

    index: int
    count: int
    """Of all ranks."""
    shapes: tuple[TensorShape, ...]
    """Of what travels for a micro-batch."""
    gradients_in: bool
    """As ``Stage`` has them."""
    gradients_out: bool


def order_of(recipe: Recipe, devices: int, rank: int, micro_batches: int, stages: list[StageEdges]) -> Record:
    """What the schedule of ``recipe`` lets ``rank`` do, ``stages`` being its own ones.

    Segments of the record are what stages are asked for; in each of them is one operator, which does nothing.
    """
    device, values = Device(), FakeValues()
    with fake_ranks(rank, devices):
        meshes = Meshes(recipe.layout, rank, devices, "cpu")
        where = Whereabouts([], [], {})
        recorder = Recorder(where, device, Groups.of([meshes.pp]), values.run(where))
        with values.mode, recording(recorder), recorder, where.passes():
            recorder.mark()
            _play(recorder, recipe, stages, micro_batches, meshes.pp.get_group())
            recorder.mark()
        facts = Facts(rank, devices, {}, (), micro_batches, 0, 0, 0, 0, 0, 0, {}, {}, False, "")
        return Record(
            facts, recorder.operators, recorder.allocations(), recorder.groups.known, [], [], recorder.segments
        )


def _play(
    recorder: Recorder, recipe: Recipe, stages: list[StageEdges], micro_batches: int, group: dist.ProcessGroup
) -> None:
    runners = [_Understudy(recorder, edges, group) for edges in stages]
    losses: list[Tensor] = []

    def loss(output: Tensor, micro_batch: int) -> Tensor:
        with recorder.segment("loss", stages[-1].count - 1, micro_batch, [output]) as gives:
            recorder.mark()
            gives += [torch.empty(()), torch.empty(())]
            losses.append(gives[0])
            scaled = gives[1]
        if stages[-1].gradients_in:  # the loss keeps its graph, whose leaves are what was received
            scaled.received = runners[-1].fwd_cache[micro_batch][1]  # type: ignore[attr-defined]
        return scaled

    plan = PipelinePlan(recipe.layout.pp_schedule, recipe.layout.pp, (1,) * stages[0].count)
    schedule = training_schedule(runners, micro_batches, plan, loss)  # type: ignore[arg-type]
    for runner in runners:
        runner.has_backward = True
        runner.expect([runner.shapes] * micro_batches)
    schedule._step_microbatches(
        kwarg_mbs=[{"batch": number} for number in range(micro_batches)],
        target_mbs=list(range(micro_batches)),
        return_outputs=False,
    )
    for runner in runners:
        runner.clear_runtime_states()


class _Understudy(StageRunner):
    """Stands in for a StageRunner: hands back memory without having computed."""

    def __init__(self, recorder: Recorder, edges: StageEdges, group: dist.ProcessGroup) -> None:
        travels = tuple(map(str, range(len(edges.shapes))))
        stage = Stage(
            edges.index, edges.count, nn.Identity(), Passage(), travels, edges.gradients_in, edges.gradients_out
        )
        super().__init__(stage, lambda model, batch: batch, torch.device("cpu"), group)
        self.submod = _Units(recorder, edges.index)
        self.shapes = edges.shapes
        self._recorder = recorder

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """See StageRunner."""
        received = self._received.pop(fwd_chunk_id, [])
        with self._recorder.segment("forward", self.stage_index, fwd_chunk_id, received) as gives:
            self._recorder.mark()
            gives += [torch.empty(())] if self.is_last else self._empty(fwd_chunk_id)
            outputs = tuple(gives)
        self.fwd_cache[fwd_chunk_id] = (() if self.is_last else outputs, received)
        return outputs[0] if self.is_last else outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """See StageRunner."""
        outputs, received = self.fwd_cache.pop(bwd_chunk_id)
        gradients = self._gradients.pop(bwd_chunk_id, [])
        kind = "backward" if full_backward else "backward_input"
        made: tuple[Tensor, ...] = ()
        with self._recorder.segment(kind, self.stage_index, bwd_chunk_id, (*received, *gradients)) as gives:
            self._recorder.mark()
            del outputs, received, gradients
            if loss is not None and not full_backward:
                loss.received = ()  # the graph is cut there
            if self._stage.gradients_in:
                gives += self._empty(bwd_chunk_id)
                made = tuple(gives)
        if self._stage.gradients_in:
            self.bwd_cache[bwd_chunk_id] = made

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See StageRunner."""
        with self._recorder.segment("backward_weight", self.stage_index, bwd_chunk_id):
            self._recorder.mark()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See StageRunner."""
        with self._recorder.segment("reduce", self.stage_index, -1):
            self._recorder.mark()


class _Units(FSDPModule, nn.Module):
    """Stands in for all units of FSDP2 of a stage."""

    def __new__(cls, *_: Any) -> "_Units":
        """A plain object: FSDP2's classes make one of the class that they wrap."""
        return object.__new__(cls)

    def __init__(self, recorder: Recorder, stage: int) -> None:
        nn.Module.__init__(self)
        self._recorder = recorder
        self._stage = stage

    def unshard(self, async_op: bool = False) -> Any:
        """All units are gathered; what is returned waits for them."""
        self._act("gather")
        return _Wait(self)

    def reshard(self) -> None:
        """All units are freed."""
        self._act("free")

    def _act(self, kind: str) -> None:
        with self._recorder.segment(kind, self._stage, -1):
            self._recorder.mark()


@dataclass(frozen=True)
class _Wait:
    units: _Units

    def wait(self) -> None:
        """They are gathered."""
        self.units._act("gathered")


def labels(record: Record) -> Iterator[tuple[str, int, int]]:
    """Of the segments of a record."""
    return (segment.label for segment in record.segments)
