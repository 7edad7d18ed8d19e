"""Members of a group that met in one collective with another operation, element type or size than the rest.

Rules of sizes: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html. Of an all-to-all the rows per
rank may differ as they like; what one rank sends to another is compared where the dump tells it (PyTorch 2.11), else
only the totals of all members.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod

from headway.explain.flight_recorder.dump import Call
from headway.explain.flight_recorder.job import Group, Job, Member

_UNEQUAL_INPUTS = {"all_to_all", "scatter", "all_to_all_single", "all_to_all_v_single", "all_gather_v"}
_UNEQUAL_OUTPUTS = {"all_to_all", "gather", "all_to_all_single", "all_to_all_v_single", "reduce_scatter_v"}
_ALL_TO_ALL = {"all_to_all", "all_to_all_single", "all_to_all_v_single"}
_WITHOUT_DATA = {"barrier", "all_reduce_barrier", "split", "coalesced"}


@dataclass(frozen=True)
class Mismatch:
    """One collective that members of a group called differently."""

    group: Group
    sequence: int
    what: str
    """``operation``, ``element type``, ``size`` or ``all-to-all splits``."""
    odd: tuple[int, ...]
    """The fewest that agree with each other against the rest; all, where it stands even."""
    said: Mapping[int, str]
    """What each member called."""
    calls: Mapping[int, Call]
    skipped: str = ""
    """The collective that the odd ones left out, when all they did is what the others did after it."""

    @property
    def call(self) -> Call:
        """As one of those called it that agree with most."""
        return next(
            (call for rank, call in self.calls.items() if rank not in self.odd), next(iter(self.calls.values()))
        )


def mismatches_of(job: Job) -> list[Mismatch]:
    """For each group its first unfinished collective that members called differently, in order of time."""
    found = []
    for group in job.groups:
        members = job.progress[group]
        numbers = sorted({number for member in members.values() for number in member.calls})
        for sequence in numbers:
            met = {rank: member.calls[sequence] for rank, member in members.items() if sequence in member.calls}
            if len(met) < 2 or all(call.finished for batch in met.values() for call in batch):
                continue
            if mismatch := _compare(group, sequence, met, members):
                found.append(mismatch)
                break
    return sorted(found, key=lambda mismatch: mismatch.call.created_ns or 0)


def _compare(
    group: Group, sequence: int, met: Mapping[int, tuple[Call, ...]], members: Mapping[int, Member]
) -> Mismatch | None:
    first = {rank: batch[0] for rank, batch in met.items()}
    names = {rank: "+".join(call.name for call in batch) for rank, batch in met.items()}
    if len(set(names.values())) > 1:
        odd = _odd(names)
        skipped = _skipped(sequence, odd, members)
        return Mismatch(group, sequence, "operation", odd, names, first, skipped)
    name = next(iter(first.values())).name
    if any(len(batch) > 1 for batch in met.values()) or name in _WITHOUT_DATA:
        return None
    dtypes = {rank: " ".join(dict.fromkeys(call.dtypes)) for rank, call in first.items()}
    if len(set(dtypes.values())) > 1:
        return Mismatch(group, sequence, "element type", _odd(dtypes), dtypes, first)
    if name in _ALL_TO_ALL:
        return _all_to_all(group, sequence, first)
    sizes = {rank: _elements(name, call) for rank, call in first.items()}
    if len(set(sizes.values())) > 1:
        said = {rank: f"{list(map(list, call.input_sizes))}" for rank, call in first.items()}
        if len(set(said.values())) == 1:
            said = {rank: f"{list(map(list, call.output_sizes))}" for rank, call in first.items()}
        return Mismatch(group, sequence, "size", _odd(sizes), said, first)
    return None


def _elements(name: str, call: Call) -> tuple[int, int]:
    """Elements in and out, as far as all members must have as many."""
    given = -1 if name in _UNEQUAL_INPUTS else sum(map(prod, call.input_sizes))
    taken = -1 if name in _UNEQUAL_OUTPUTS else sum(map(prod, call.output_sizes))
    return given, taken


def _all_to_all(group: Group, sequence: int, calls: Mapping[int, Call]) -> Mismatch | None:
    """Pairs of which one sends another number of elements than the other takes."""
    size = len(group.members)
    place = {rank: number for number, rank in enumerate(group.members)}
    told = {rank: call for rank, call in calls.items() if len(call.sent) == size == len(call.received)}
    said: dict[int, str] = {}
    disagreements: Counter[int] = Counter()
    for sender, sending in told.items():
        for taker, taking in told.items():
            sent, taken = sending.sent[place[taker]], taking.received[place[sender]]
            if sent != taken:
                said.setdefault(sender, f"sends {sent} elements to rank {taker}, which takes {taken}")
                said.setdefault(taker, f"takes {taken} elements of rank {sender}, which sends {sent}")
                disagreements.update({sender, taker})
    if said:
        # Who disagrees with most is the odd one; of a single pair neither can be told from the other.
        most = max(disagreements.values())
        odd = tuple(sorted(rank for rank, count in disagreements.items() if count == most))
        return Mismatch(group, sequence, "all-to-all splits", odd, said, calls)
    given = sum(prod(size) for call in calls.values() for size in call.input_sizes)
    taken = sum(prod(size) for call in calls.values() for size in call.output_sizes)
    if len(calls) == size and given != taken and not told:
        totals = f"all members together send {given} elements and take {taken}"
        return Mismatch(group, sequence, "all-to-all splits", tuple(sorted(calls)), dict.fromkeys(calls, totals), calls)
    return None


def _odd(said: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks that don't say what most say; all when no saying has a majority."""
    (most, count), *rest = Counter(said.values()).most_common()
    if rest and rest[0][1] == count:
        return tuple(sorted(said))
    return tuple(sorted(rank for rank, word in said.items() if word != most))


def _skipped(sequence: int, odd: tuple[int, ...], members: Mapping[int, Member]) -> str:
    """Name of the collective that the odd ones left out: what they do from here is what the others do one later."""
    others = [member for rank, member in members.items() if rank not in odd and sequence in member.calls]
    if not others:
        return ""
    usual = others[0]
    for rank in odd:
        theirs = members[rank]
        following = [number for number in sorted(theirs.calls) if number >= sequence]
        pairs = [(theirs.calls[number], usual.calls.get(number + 1)) for number in following]
        if not pairs or any(later is None or _names(batch) != _names(later) for batch, later in pairs):
            return ""
    return _names(usual.calls[sequence])


def _names(batch: tuple[Call, ...]) -> str:
    return "+".join(call.name for call in batch)
