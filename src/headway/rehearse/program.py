"""A rank's step made ready to be played: operators in runs, and what each run waits for.

A run is a stretch of one lane that nothing but the lane itself and the host holds up within it, and of which nothing
else needs more than the end. However many operators it has, it is played in one go, and exactly: with d_k the duration
of its k-th operator, issued by the host at i_k, it ends at ``max(begin + Σ d, max_k(i_k + Σ_{l ≥ k} d_l))``.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.rehearse.columns import Columns, Flags, Integers, columns_of
from headway.rehearse.compiled_kernels import kernels_of
from headway.rehearse.durations import Durations, check_devices, durations
from headway.rehearse.record import COMPUTE, Collective, Facts, Group, Record

Talk = Literal["none", "alone", "send", "recv", "meeting"]
"""What a run has to do with other ranks: ``alone``: a collective whose ranks have equal roles, so that they all arrive
when this one does; ``meeting``: one whose ranks are in several stages; the sides of a message between stages."""
CPU = "CPU"
"""Form of an accelerator that is the host itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """What :func:`headway.rehearse.play.play` needs to know of a run, besides how long it takes."""

    lane: int
    epoch: int
    """How many waits of the host precede it."""
    after: tuple[int, ...]
    """Runs that must have ended, besides the one before on its lane."""
    talk: Talk = "none"
    communicator: int = -1
    """What runs one collective after the other; -1: no collective."""
    key: tuple[object, ...] = ()
    """The same on all sides of a message or meeting."""
    places: tuple[int, ...] = ()
    """Pipeline places that meet."""


@dataclass(frozen=True)
class Program:
    """One rank's step. ``order`` holds the numbers of operators, run after run."""

    facts: Facts
    groups: dict[str, Group]
    place: int
    """Among the pipeline's."""
    columns: Columns
    durations: Durations
    runs: list[Run]
    order: Integers
    begins: Integers
    """Where in ``order`` each run begins."""
    epoch: Integers
    """How many waits of the host precede each operator: int64, ``[operators]``."""
    waits: list[tuple[int, ...]]
    """Runs that the host waits for at the end of each epoch but the last."""
    reasons: list[str]
    on_host: bool
    """Whether the host itself computes: it launches nothing and runs ahead of nothing."""
    lane_names: tuple[str, ...]
    lane: NDArray[np.int32]
    """Of each operator, a place in ``lane_names``."""


def program_of(record: Record, cluster: Cluster) -> Program:
    """Make ``record`` ready to be played on ``cluster``; it holds nothing of the record's operators.

    Raises UserError when the cluster has too few devices or a rate is not known.
    """
    check_devices(cluster, record.facts.world)
    columns = columns_of(record)
    on_host = cluster.accelerator.form == CPU
    names, lane = _lanes(record, columns, on_host)
    before = _before_on_lane(lane)
    reads = sorted(record.host_reads, key=lambda read: read.before)
    epoch = np.searchsorted([read.before for read in reads], np.arange(len(columns)), side="right").astype(np.int64)
    owner, earlier = _edges(columns, lane, on_host)
    awaited = np.zeros(len(columns), dtype=bool)
    awaited[earlier] = True
    awaited[[number for read in reads for number in read.after]] = True
    waits = np.zeros(len(columns), dtype=bool)
    waits[owner] = True
    tied = waits | columns.communicates | (before < 0)
    tied |= awaited[before] | columns.communicates[before] | (epoch != epoch[before])
    order, begins, run_of = _runs(lane, tied)
    edges: dict[int, set[int]] = {}
    for number, needed in zip(run_of[owner].tolist(), run_of[earlier].tolist(), strict=True):
        edges.setdefault(number, set()).add(needed)
    return Program(
        facts=record.facts,
        groups=record.groups,
        place=_place(record.facts, record.facts.rank),
        columns=columns,
        durations=durations(record, columns, kernels_of(record, columns, before, tied), cluster),
        runs=_described(record, lane, epoch, order[begins], edges),
        order=order,
        begins=begins,
        epoch=epoch,
        waits=[tuple(sorted({int(run_of[number]) for number in read.after})) for read in reads],
        reasons=[read.reason for read in reads],
        on_host=on_host,
        lane_names=names,
        lane=lane,
    )


def _lanes(record: Record, columns: Columns, on_host: bool) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names of lanes, and which of them each operator runs on.

    A host that computes does all itself, one thing after the other, but for what is asynchronous.
    """
    names: dict[str, int] = {}
    lane = np.array(
        [names.setdefault(columns.texts[place], len(names)) for place in columns.lane.tolist()], dtype=np.int32
    )
    if on_host:
        calls = [operator.collective for operator in record.operators]
        own = np.array([call is None or not call.asynchronous for call in calls], dtype=bool)
        lane[own] = names.setdefault(COMPUTE, len(names))
    return tuple(names), lane


def _before_on_lane(lane: NDArray[np.int32]) -> Integers:
    """The operator before each on its lane, -1 for none."""
    before = np.full(len(lane), -1, dtype=np.int64)
    order = np.argsort(lane, kind="stable")
    same = lane[order[1:]] == lane[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _edges(columns: Columns, lane: NDArray[np.int32], on_host: bool) -> tuple[Integers, Integers]:
    """(operator, one that it waits for) for each wait that its lane does not see to."""
    owner = np.repeat(np.arange(len(columns)), columns.after_count)
    earlier = columns.after
    kept = lane[owner] != lane[earlier]
    owner, earlier = owner[kept], earlier[kept]
    if on_host:
        # What is handed to a thread of its own starts when the host comes to it.
        handed = np.flatnonzero(lane != lane[np.maximum(np.arange(len(lane)) - 1, 0)])
        handed = handed[columns.communicates[handed]]
        owner, earlier = np.concatenate([owner, handed]), np.concatenate([earlier, handed - 1])
    return owner, earlier


def _runs(lane: NDArray[np.int32], tied: Flags) -> tuple[Integers, Integers, Integers]:
    """Operators run after run, where each run begins among them, and the run of each operator.

    Runs stand in the order of their first operators: that is a topological order, as only ends of runs are awaited.
    """
    by_lane = np.argsort(lane, kind="stable")
    opens = tied[by_lane]
    firsts = by_lane[opens]
    ranks = np.empty(len(firsts), dtype=np.int64)
    ranks[np.argsort(firsts, kind="stable")] = np.arange(len(firsts))
    run_of = np.empty(len(lane), dtype=np.int64)
    run_of[by_lane] = ranks[np.cumsum(opens) - 1]
    order = np.argsort(run_of, kind="stable")
    begins = np.searchsorted(run_of[order], np.arange(len(firsts)))
    return order, begins, run_of


def _described(
    record: Record, lane: NDArray[np.int32], epoch: Integers, firsts: Integers, edges: dict[int, set[int]]
) -> list[Run]:
    communicators: dict[tuple[object, ...], int] = {}
    places = {
        key: tuple(sorted({_place(record.facts, rank) for rank in group.ranks})) for key, group in record.groups.items()
    }
    runs = []
    for run, number in enumerate(firsts.tolist()):
        after = tuple(sorted(edges.get(run, ())))
        call = record.operators[number].collective
        if call is None:
            runs.append(Run(int(lane[number]), int(epoch[number]), after))
            continue
        talk, key, meets = _talk(record, call, places[call.group])
        name = (call.group, call.kind, call.peer) if call.peer >= 0 else (call.group,)
        communicator = communicators.setdefault(name, len(communicators))
        runs.append(Run(int(lane[number]), int(epoch[number]), after, talk, communicator, key, meets))
    return runs


def _talk(
    record: Record, call: Collective, places: tuple[int, ...]
) -> tuple[Talk, tuple[object, ...], tuple[int, ...]]:
    """How to play a collective of ranks in ``places`` of the pipeline, its sides' key, and the places that meet."""
    axis = record.groups[call.group].axis
    if call.kind in ("send", "recv"):
        here, there = _place(record.facts, record.facts.rank), _place(record.facts, call.peer)
        if there == here:
            return "alone", (), ()
        ends = (here, there) if call.kind == "send" else (there, here)
        return call.kind, ("message", axis, *ends), ()
    if len(places) == 1:
        return "alone", (), ()
    return "meeting", ("meeting", axis, *places), places


def _place(facts: Facts, rank: int) -> int:
    """The pipeline place of a rank: stages are the outermost axis."""
    return rank // (facts.world // facts.sizes.get("pp", 1))
