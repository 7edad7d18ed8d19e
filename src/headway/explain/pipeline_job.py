"""A job's forward, backward and communication events as a graph that can be played: pipelines with data parallelism.

All data ranks and steps of a job do the same operations in the same order, so an operation is (type, number, stage),
and its durations are an array over data ranks and steps that is played at once. What an operation waits for (Lin et
al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025, section 4): the one before it
on its stream; a receive for its stage's work before it; a forward or backward pass for its receive; sends for their
pass; collectives for all their ranks. A communication ends its transfer after the last of its ranks has come.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headway.errors import UserError

FORWARD, BACKWARD = "forward-compute", "backward-compute"
PARAMETERS, GRADIENTS, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
NORMS, EMBEDDING, CLIP, OPTIMIZER, GC = (
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
    "gc",
)
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COMMUNICATES = frozenset((*MESSAGES, PARAMETERS, GRADIENTS, SEPARATE, NORMS, EMBEDDING, CLIP))
"""Typical time of these is a median, of the others a mean."""
OVER_DATA_RANKS = frozenset((PARAMETERS, GRADIENTS, SEPARATE, CLIP))

Times = NDArray[np.float64]
"""Seconds, ``[data ranks, steps]``."""
Key = tuple[str, int, int]
"""(type, number, stage) of an operation."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of a stage on all data ranks and in all steps."""

    key: Key
    chunk: int
    """Which chunk of the model of those on its stage; -1: none."""
    place: int
    """Which chunk of the model of all, in the order of the forward pass; -1: none."""
    start: Times
    duration: Times

    @property
    def kind(self) -> str:
        """The type, as the table spells it."""
        return self.key[0]

    @property
    def stage(self) -> int:
        """The pipeline's stage."""
        return self.key[2]

    @property
    def end(self) -> Times:
        """When it ended."""
        return self.start + self.duration


@dataclass(frozen=True, eq=False)
class PipelineJob:
    """The operations of a job and what they wait for. Raises UserError where these are no such job's."""

    operations: Mapping[Key, Operation]
    ranks: NDArray[np.int64]
    """Rank numbers: ``[data ranks, stages]``."""

    @cached_property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return 1 + max(key[2] for key in self.operations)

    @cached_property
    def data_ranks(self) -> int:
        """How many replicas of the pipeline there are."""
        return int(next(iter(self.operations.values())).start.shape[0])

    @cached_property
    def groups(self) -> tuple[tuple[Key, ...], ...]:
        """Operations that end together, after the last has begun."""
        groups = [tuple(pair) for pair in self._message_pairs()]
        for kind in (PARAMETERS, GRADIENTS, SEPARATE):
            groups += [(operation.key,) for operation in self._of(kind)] if self.data_ranks > 1 else []
        groups += [tuple(op.key for op in self._of(EMBEDDING))] if self._of(EMBEDDING) else []
        groups += [tuple(op.key for op in self._of(CLIP))] if self._of(CLIP) else []
        return tuple(groups)

    @cached_property
    def group_of(self) -> dict[Key, int]:
        """The group of an operation, for those that have one."""
        return {key: number for number, group in enumerate(self.groups) for key in group}

    @cached_property
    def measured(self) -> dict[Key, Times]:
        """What each operation takes by itself: a communication from its last rank's arrival, the others as they are."""
        own = {}
        for key, operation in self.operations.items():
            if key not in self.group_of:
                own[key] = operation.duration
                continue
            last = np.maximum.reduce([self.operations[one].start for one in self.groups[self.group_of[key]]])
            if operation.kind in OVER_DATA_RANKS:
                last = np.broadcast_to(last.max(axis=0), last.shape)
            own[key] = np.maximum(operation.end - last, 0)
        return own

    @cached_property
    def typical(self) -> dict[Key, Times]:
        """The same with every operation taking what its type takes: the mean of work, the median of communication."""
        values: dict[str, list[Times]] = {}
        for key, own in self.measured.items():
            values.setdefault(key[0], []).append(own)
        level = {
            kind: float((np.median if kind in COMMUNICATES else np.mean)(np.stack(own))) for kind, own in values.items()
        }
        return {key: np.full_like(own, level[key[0]]) for key, own in self.measured.items()}

    def exchanged(
        self,
        times: Mapping[Key, Times],
        others: Mapping[Key, Times],
        chosen: Callable[[Operation], bool | NDArray[np.bool_]],
    ) -> dict[Key, Times]:
        """``times`` with those of ``others`` for the operations (or data ranks of them) that are ``chosen``."""
        return {key: np.where(chosen(operation), others[key], times[key]) for key, operation in self.operations.items()}

    def step_time(self, times: Mapping[Key, Times]) -> float:
        """Mean time of a step, s, when operations take ``times`` and nothing else delays them."""
        return float(self.steps(times).mean())

    def steps(self, times: Mapping[Key, Times]) -> NDArray[np.float64]:
        """Time of each step, s: ``[steps]``."""
        starts: dict[Key, Times] = {}
        ends: dict[Key, Times] = {}
        begun = [0] * len(self.groups)
        for key in self._order:
            before = [ends[one] for one in self._waits_for[key]]
            starts[key] = np.maximum.reduce(before) if before else np.zeros_like(times[key])
            if key not in self.group_of:
                ends[key] = starts[key] + times[key]
                continue
            number = self.group_of[key]
            begun[number] += 1
            if begun[number] < len(self.groups[number]):
                continue
            last = np.maximum.reduce([starts[one] for one in self.groups[number]])
            if key[0] in OVER_DATA_RANKS:
                last = np.broadcast_to(last.max(axis=0), last.shape)
            for one in self.groups[number]:
                ends[one] = last + times[one]
        finish: NDArray[np.float64] = np.maximum.reduce(list(ends.values())).max(axis=0)
        return finish

    def _of(self, kind: str, stage: int | None = None) -> list[Operation]:
        """Operations of a type in the order in which the first data rank began them in the first step."""
        return sorted(
            (one for one in self.operations.values() if one.kind == kind and stage in (None, one.stage)),
            key=_began,
        )

    def _work(self, stage: int) -> list[Operation]:
        return sorted((*self._of(FORWARD, stage), *self._of(BACKWARD, stage)), key=_began)

    def _messages(self, kind: str, stage: int) -> list[tuple[Operation, Operation, bool]]:
        """Messages of a type and stage with the pass each belongs to, and whether anything is really sent.

        With several chunks a stage some recorders note a message for every pass, though the first chunk of the model
        receives nothing and the last sends nothing; of receives the very first may be missing.
        """
        direction, way = kind.split("-")
        passes = self._of(f"{direction}-compute", stage)
        messages = self._of(kind, stage)
        if way == "recv":
            passes = passes[len(passes) - len(messages) :] if len(messages) < len(passes) else passes
        chunks = self.stages * (1 + max(one.chunk for one in self.operations.values() if one.kind == FORWARD))
        found = []
        for message, work in zip(messages, passes, strict=False):
            towards = 1 if (direction == "forward") == (way == "send") else -1
            found.append((message, work, 0 <= work.place + towards < chunks))
        return found

    def _message_pairs(self) -> list[list[Key]]:
        pairs: list[list[Key]] = []
        for direction, towards in (("forward", 1), ("backward", -1)):
            for stage in range(self.stages):
                peer = (stage + towards) % self.stages
                sent = [one.key for one, _, real in self._messages(f"{direction}-send", stage) if real]
                received = [one.key for one, _, real in self._messages(f"{direction}-recv", peer) if real]
                if len(sent) != len(received):
                    raise UserError(
                        f"stage {stage} sends {len(sent)} {direction} messages, stage {peer} receives {len(received)}"
                    )
                pairs += [list(pair) for pair in zip(sent, received, strict=True)]
        return pairs

    @cached_property
    def _waits_for(self) -> dict[Key, list[Key]]:
        waits: dict[Key, list[Key]] = {key: [] for key in self.operations}
        for stage in range(self.stages):
            work = [one.key for one in self._work(stage)]
            _chain(waits, work)
            for kind in MESSAGES:
                _chain(waits, [one.key for one in self._of(kind, stage)])
                self._wait_for_messages(waits, kind, stage)
            self._first_backward_messages(waits, stage, work)
            if self.data_ranks > 1:
                _chain(waits, [one.key for one in (*self._of(PARAMETERS, stage), *self._of(GRADIENTS, stage))])
                self._wait_for_parameters(waits, stage)
            self._end_of_step(waits, stage, work)
        return waits

    def _wait_for_messages(self, waits: dict[Key, list[Key]], kind: str, stage: int) -> None:
        passes = [one.key for one in self._of(f"{kind.split('-')[0]}-compute", stage)]
        for message, work, _ in self._messages(kind, stage):
            if kind.endswith("send"):
                waits[message.key].append(work.key)
                continue
            waits[work.key].append(message.key)
            if (at := passes.index(work.key)) > 0:
                waits[message.key].append(passes[at - 1])

    def _first_backward_messages(self, waits: dict[Key, list[Key]], stage: int, work: Sequence[Key]) -> None:
        """They are posted after the last forward pass but one that comes before the first backward pass."""
        first = next((at for at, key in enumerate(work) if key[0] == BACKWARD), 0)
        if first >= 2:
            for kind in ("backward-recv", "backward-send"):
                for message in self._of(kind, stage)[:1]:
                    waits[message.key].append(work[first - 2])

    def _wait_for_parameters(self, waits: dict[Key, list[Key]], stage: int) -> None:
        """The first forward pass of a chunk waits for the last gathering of its parameters."""
        gathers = {one.chunk: one for one in self._of(PARAMETERS, stage)}
        for chunk, gather in gathers.items():
            first = next((one for one in self._of(FORWARD, stage) if one.chunk == chunk), None)
            if first is not None:
                waits[first.key].append(gather.key)

    def _end_of_step(self, waits: dict[Key, list[Key]], stage: int, work: Sequence[Key]) -> None:
        """What follows the last backward pass; gradients are reduced during it when there is a separate reduction."""
        if not work:
            raise UserError(f"stage {stage} has no {FORWARD} and no {BACKWARD}")
        operations = self.operations
        last = max(work, key=lambda key: float(operations[key].end[0, 0]))
        gradients = [one.key for one in self._of(GRADIENTS, stage)] if self.data_ranks > 1 else []
        overlapped = bool(self._of(SEPARATE))
        chain = [one.key for one in self._of(GC, stage)[:1]] or [last]
        if chain != [last]:
            waits[chain[0]].append(last)
        after = [one.key for kind in (NORMS, EMBEDDING) for one in self._of(kind, stage)]
        after += [one.key for one in self._of(SEPARATE, stage)] if overlapped else gradients
        after += [one.key for kind in (CLIP, OPTIMIZER) for one in self._of(kind, stage)]
        if overlapped and gradients and after:
            waits[after[0]].append(gradients[-1])
            for key in gradients:
                chunk = [one for one in self._of(BACKWARD, stage) if one.chunk == operations[key].chunk]
                if chunk:
                    waits[key].append(max(chunk, key=lambda one: float(one.end[0, 0])).key)
        _chain(waits, [chain[0], *after])

    @cached_property
    def _order(self) -> list[Key]:
        """Operations so that each comes after what it waits for. Raises UserError when they wait in a circle."""
        open_waits = {key: len(waits) for key, waits in self._waits_for.items()}
        follow: dict[Key, list[Key]] = {key: [] for key in self.operations}
        for key, waits in self._waits_for.items():
            for one in waits:
                follow[one].append(key)
        ready = deque(key for key, count in open_waits.items() if not count)
        arrived = [0] * len(self.groups)
        order = []
        while ready:
            key = ready.popleft()
            order.append(key)
            done: Sequence[Key] = (key,)
            if key in self.group_of:
                number = self.group_of[key]
                arrived[number] += 1
                done = self.groups[number] if arrived[number] == len(self.groups[number]) else ()
            for one in done:
                for later in follow[one]:
                    open_waits[later] -= 1
                    if not open_waits[later]:
                        ready.append(later)
        if len(order) < len(self.operations):
            raise UserError("its operations wait for each other in a circle: it is no pipeline of the kinds known here")
        return order


def _began(operation: Operation) -> tuple[float, int, str]:
    return float(operation.start[0, 0]), operation.key[1], operation.kind


def _chain(waits: dict[Key, list[Key]], keys: Sequence[Key]) -> None:
    for before, after in pairwise(keys):
        waits[after].append(before)
