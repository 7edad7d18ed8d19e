"""Ranks whose device stopped: others have seen a collective finish that these have joined and never saw finish.

Where every member needs data of every other, a collective that finished anywhere has been fed by all members: the rank
that goes on reporting it unfinished is itself at fault, not waiting for anybody.
"""

from collections import defaultdict
from dataclasses import dataclass

from headway.explain.flight_recorder.dump import Call
from headway.explain.flight_recorder.job import Group, Job

_NEEDS_ALL = {
    "all_reduce",
    "all_gather",
    "_all_gather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "all_reduce_barrier",
}
_FEWEST = 2
"""One collective that others finished may only not have been noticed yet: the library looks every 100 ms."""


@dataclass(frozen=True)
class StoppedDevice:
    """A rank that reports collectives unfinished that its peers finished."""

    rank: int
    calls: tuple[tuple[Group, Call], ...]
    """The collectives, in the rank's order."""
    peers: tuple[int, ...]
    """Ranks that saw them finish."""


def stopped_devices(job: Job) -> list[StoppedDevice]:
    """The ranks whose device stopped; the one that went furthest back first."""
    behind: dict[int, list[tuple[Group, Call]]] = defaultdict(list)
    peers: dict[int, set[int]] = defaultdict(set)
    for group in job.groups:
        members = job.progress[group]
        for rank, member in members.items():
            for sequence, batch in member.calls.items():
                call = batch[0]
                # gloo retires what failed as it does what finished.
                if call.finished or call.name not in _NEEDS_ALL or call.backend == "gloo":
                    continue
                done = [other for other, theirs in members.items() if other != rank and theirs.finished(sequence)]
                if done:
                    behind[rank].append((group, call))
                    peers[rank].update(done)
    found = [
        StoppedDevice(rank, tuple(sorted(calls, key=lambda pair: pair[1].record)), tuple(sorted(peers[rank])))
        for rank, calls in behind.items()
        if len(calls) >= _FEWEST
    ]
    return sorted(found, key=lambda stopped: (stopped.calls[0][1].created_ns or 0, stopped.rank))
