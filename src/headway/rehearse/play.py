"""Playing programs: when each run of operators begins and ends, on one rank or on the ranks of all pipeline stages."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.rehearse.columns import Integers
from headway.rehearse.program import Program


@dataclass(frozen=True)
class Load:
    """How long everything of a program takes, in ns."""

    operators: Integers
    """Durations: int64, ``[operators]``."""
    issued: Integers
    """When the host has launched each operator, from the beginning of its epoch on: int64, ``[operators]``."""
    epochs: list[int]
    """Host time of each epoch."""
    duration: list[int]
    """Of each run."""
    held_back: list[int]
    """For each run ``max_k(issued_k + Σ_{l ≥ k} d_l)``: when it ends at the earliest, from the beginning of its
    epoch on."""


@dataclass
class Played:
    """When the runs of a program began and ended, in ns from the beginning of the step."""

    begin: list[int]
    """Of a collective: when all its ranks had arrived."""
    end: list[int]
    epoch: list[int] = field(default_factory=lambda: [0])
    """When the host began each epoch."""
    host_end: int = 0


def load_of(program: Program, nanoseconds: Integers, launch_ns: float) -> Load:
    """The load of ``program`` with durations ``nanoseconds`` (int64, ``[operators]``) and ``launch_ns`` a launch.

    A host that computes spends what a launch takes on the operator itself.
    """
    launched = program.durations.launched
    launches = np.where(launched, round(launch_ns), 0).astype(np.int64)
    if program.on_host:
        nanoseconds, launches = nanoseconds + launches, np.zeros_like(launches)
    count = len(program.waits) + 1
    total = np.cumsum(launches)
    epochs = np.bincount(program.epoch, weights=launches, minlength=count).astype(np.int64)
    issued = total - (np.cumsum(epochs) - epochs)[program.epoch]
    ordered = nanoseconds[program.order]
    passed = np.cumsum(ordered)
    stops = np.append(program.begins[1:], len(program.order)) - 1
    if len(program.runs):
        duration = np.diff(passed[stops], prepend=0)
        latest = np.maximum.reduceat(issued[program.order] - (passed - ordered), program.begins)
        held_back = passed[stops] + latest
    else:
        duration = held_back = np.zeros(0, dtype=np.int64)
    return Load(nanoseconds, issued, epochs.tolist(), duration.tolist(), held_back.tolist())


def play(programs: Sequence[Program], loads: list[Load]) -> list[Played]:
    """Play one program for each pipeline place. Raises ValueError when they wait for each other for ever.

    A rank goes on until it needs a message that is not sent yet, or a meeting at which others have yet to arrive;
    then another one does.
    """
    places = {program.place for program in programs}
    sent: dict[tuple[object, ...], list[int]] = {}
    arrived: dict[tuple[object, ...], dict[int, int]] = {}
    played = [Played([0] * len(program.runs), [0] * len(program.runs)) for program in programs]
    waiting = deque(
        _play_one(program, load, result, places, sent, arrived)
        for program, load, result in zip(programs, loads, played, strict=True)
    )
    in_vain = 0
    while waiting:
        rank = waiting.popleft()
        progress = next(rank, None)
        if progress is not None:
            waiting.append(rank)
            in_vain = 0 if progress else in_vain + 1
            if in_vain > len(waiting):
                raise ValueError("the records of the pipeline's ranks wait for each other: they are not of one step")
        else:
            in_vain = 0
    return played


def _play_one(
    program: Program,
    load: Load,
    result: Played,
    places: set[int],
    sent: dict[tuple[object, ...], list[int]],
    arrived: dict[tuple[object, ...], dict[int, int]],
) -> Iterator[bool]:
    """Plays until the end; yields whenever it has to wait, with whether it came on since the last time."""
    begins, ends = result.begin, result.end
    lanes, free = [0] * len(program.lane_names), [0] * len(program.runs)
    counts: dict[tuple[object, ...], int] = {}
    epoch, host, progress = 0, 0, True
    for number, run in enumerate(program.runs):
        while epoch < run.epoch:
            host = _next_epoch(program, load, result, epoch)
            epoch += 1
        lane = run.lane
        begin = lanes[lane]
        for earlier in run.after:
            if ends[earlier] > begin:
                begin = ends[earlier]
        duration, held_back = load.duration[number], host + load.held_back[number]
        if run.talk == "none":
            end = begin + duration
            if held_back > end:
                end = held_back
        else:
            begin = max(begin, held_back - duration, free[run.communicator])
            if run.talk == "send":
                sent.setdefault(run.key, []).append(begin)
            elif run.talk == "recv":
                place = counts[run.key] = counts.get(run.key, -1) + 1
                messages = sent.setdefault(run.key, [])
                while len(messages) <= place:
                    yield progress
                    progress = False
                progress = True
                begin = max(begin, messages[place])
            elif run.talk == "meeting":
                place = counts[run.key] = counts.get(run.key, -1) + 1
                meeting = arrived.setdefault((*run.key, place), {})
                meeting[program.place] = begin
                while len(meeting) < len(places.intersection(run.places)):
                    yield progress
                    progress = False
                progress = True
                begin = max(meeting.values())
            end = begin + duration
            free[run.communicator] = end
        begins[number], ends[number], lanes[lane] = begin, end, end
    while epoch < len(program.waits):
        _next_epoch(program, load, result, epoch)
        epoch += 1
    result.host_end = result.epoch[-1] + load.epochs[-1]


def _next_epoch(program: Program, load: Load, result: Played, epoch: int) -> int:
    """When the host goes on after the wait that ends ``epoch``."""
    begin = max((result.end[run] for run in program.waits[epoch]), default=0)
    begin = max(begin, result.epoch[epoch] + load.epochs[epoch])
    result.epoch.append(begin)
    return begin


def operator_times(program: Program, load: Load, played: Played) -> tuple[Integers, Integers, Integers]:
    """Start, end and launch of each operator in ns from the beginning of the step: int64, ``[operators]`` each.

    On each lane, with P the sum of the durations before: ``start_k = P_k + max_{j ≤ k}(may start_j - P_j)``.
    """
    issued = load.issued + np.array(played.epoch, dtype=np.int64)[program.epoch]
    may_start = issued.copy()
    firsts = program.order[program.begins]
    may_start[firsts] = np.maximum(may_start[firsts], np.array(played.begin, dtype=np.int64))
    start = np.empty_like(issued)
    by_lane = np.argsort(program.lane, kind="stable")
    for some in np.split(by_lane, np.flatnonzero(np.diff(program.lane[by_lane])) + 1):
        passed = np.cumsum(load.operators[some]) - load.operators[some]
        start[some] = passed + np.maximum.accumulate(may_start[some] - passed)
    return start, start + load.operators, issued
