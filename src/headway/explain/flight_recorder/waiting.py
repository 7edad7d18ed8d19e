"""Who waits for whom, and who at the end of that is waited for without waiting: the roots of a hang."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headway.explain.flight_recorder.dump import RECEIVE, SEND, Call
from headway.explain.flight_recorder.job import Group, Job


@dataclass(frozen=True)
class Wait:
    """Ranks that have joined a collective (or posted a message) that others have not."""

    group: Group
    sequence: int
    call: Call
    """As the first of the waiting made it."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def since_ns(self) -> int:
        """When the first of the waiting made the call; 0 when it is not known."""
        return self.call.created_ns or 0


@dataclass(frozen=True)
class Unfinished:
    """A collective that every member has joined and not every member has seen finish."""

    group: Group
    sequence: int
    call: Call
    waiting: tuple[int, ...]
    finished: tuple[int, ...]


def waits_of(job: Job) -> list[Wait]:
    """For each group its unfinished collectives that some member has not joined, and messages without other side."""
    found = []
    for group in job.groups:
        found += _collective_waits(job, group)
        found += _message_waits(job, group)
    return sorted(found, key=lambda wait: (wait.since_ns, wait.call.record))


def unfinished_of(job: Job) -> list[Unfinished]:
    """Collectives that all members with a dump have joined and not all have finished, in order of time."""
    found = []
    for group in job.groups:
        members = job.progress[group]
        for sequence, waiting in _pending(job, group).items():
            if all(members[rank].last >= sequence for rank in members) and len(members) == len(group.members):
                done = tuple(rank for rank in members if members[rank].finished(sequence))
                found.append(Unfinished(group, sequence, _first_call(job, group, sequence, waiting), waiting, done))
    return sorted(found, key=lambda unfinished: unfinished.call.created_ns or 0)


def roots_of(waits: Sequence[Wait]) -> tuple[tuple[int, ...], Wait | None]:
    """Ranks that are waited for and wait for nobody; else those that left a circle of waiting ranks.

    Returns the ranks, and the wait that shows who left the circle (None where there is none).
    """
    waiting = {rank for wait in waits for rank in wait.waiting}
    blamed = {rank for wait in waits for rank in wait.missing}
    if roots := blamed - waiting:
        explained = _waiting_for(roots, waits)
        rest = [wait for wait in waits if not set(wait.waiting) & explained and not set(wait.missing) & explained]
        if not rest:
            return tuple(sorted(roots)), None
        others, circle = roots_of(rest)
        return tuple(sorted(roots | set(others))), circle
    if not waits:
        return (), None
    # In a circle, those few are the ones that went another way that the many of a group miss.
    circle = min(waits, key=lambda wait: (len(wait.missing) / len(wait.group.members), wait.since_ns))
    return circle.missing, circle


def _waiting_for(roots: set[int], waits: Sequence[Wait]) -> set[int]:
    """``roots`` and all ranks that wait for them, directly or through others."""
    by_missing: dict[int, list[int]] = defaultdict(list)
    for place, wait in enumerate(waits):
        for rank in wait.missing:
            by_missing[rank].append(place)
    reached, todo, seen = set(roots), list(roots), set()
    while todo:
        for place in by_missing.pop(todo.pop(), []):
            if place not in seen:
                seen.add(place)
                fresh = set(waits[place].waiting) - reached
                reached |= fresh
                todo += fresh
    return reached


def _pending(job: Job, group: Group) -> dict[int, tuple[int, ...]]:
    """Ranks that have joined and not finished, by the collective's number."""
    pending: dict[int, list[int]] = defaultdict(list)
    for rank, member in job.progress[group].items():
        for sequence, batch in member.calls.items():
            if not all(call.finished for call in batch):
                pending[sequence].append(rank)
    return {sequence: tuple(ranks) for sequence, ranks in sorted(pending.items())}


def _collective_waits(job: Job, group: Group) -> list[Wait]:
    members = job.progress[group]
    found = []
    for sequence, waiting in _pending(job, group).items():
        late = tuple(rank for rank, member in members.items() if member.last < sequence)
        if any(member.finished(sequence) for member in members.values()):
            late = ()  # as in a broadcast, whose root need not wait: nobody keeps the others waiting
        # Where a rank with a dump has not come, nothing is known of those without.
        missing = late or tuple(rank for rank in group.members if rank not in members)
        if missing:
            found.append(Wait(group, sequence, _first_call(job, group, sequence, waiting), waiting, missing))
    return found


def _message_waits(job: Job, group: Group) -> list[Wait]:
    """The n-th unfinished send to a rank belongs to that rank's n-th unfinished receive from the sender."""
    posted: dict[tuple[int, int, str], list[Call]] = defaultdict(list)
    for rank, member in job.progress[group].items():
        for call in member.messages:
            if not call.finished and call.peer is not None and call.peer < len(group.members):
                posted[rank, group.members[call.peer], call.name].append(call)
    found = []
    for (rank, peer, name), calls in posted.items():
        other = posted.get((peer, rank, SEND if name == RECEIVE else RECEIVE), [])
        if len(calls) > len(other):
            call = calls[len(other)]
            found.append(Wait(group, call.sequence, call, (rank,), (peer,)))
    return found


def _first_call(job: Job, group: Group, sequence: int, ranks: Sequence[int]) -> Call:
    calls = [job.progress[group][rank].calls[sequence][0] for rank in ranks]
    return min(calls, key=lambda call: call.created_ns or 0)
