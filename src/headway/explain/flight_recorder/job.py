"""The dumps of a job side by side: its groups, and how far each rank has come in each of them."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from headway.explain.flight_recorder.dump import Call, Dump

WORLD = "default_pg"


@dataclass(frozen=True)
class Group:
    """A process group: ranks that meet in collectives."""

    name: str
    description: str
    members: tuple[int, ...]
    """Global ranks in the group's order."""

    @property
    def axis(self) -> str:
        """Mesh axis that the group's description names (``tp``, ``pp``, ``dp_shard``, …); empty when it names none."""
        return axis_named(self.description)

    def __str__(self) -> str:
        shown = f"group {self.name}"
        if self.description not in ("", "undefined"):
            shown += f" ({self.description})"
        return shown


@dataclass(frozen=True)
class Member:
    """What one rank did in one group."""

    calls: Mapping[int, tuple[Call, ...]]
    """Collectives by sequence number: several when they were issued as one batch."""
    messages: tuple[Call, ...]
    """Sends and receives, in order."""
    last: int
    """Number of the last collective that the rank has joined; -1 when it is not known to have joined any."""
    last_finished: int
    """Number up to which the library says that all has finished; -1 when it does not say."""

    def finished(self, sequence: int) -> bool:
        """The rank has seen the collective finish: its call says so, or it is gone from the ring of later ones."""
        if calls := self.calls.get(sequence):
            return all(call.finished for call in calls)
        return sequence <= max(self.last_finished, self.last if self.calls else -1)


@dataclass(frozen=True)
class Job:
    """Ranks and groups of all dumps."""

    dumps: Mapping[int, Dump]
    groups: tuple[Group, ...]
    members_told: bool
    """The dumps tell the groups' members; if not, those are taken that used the group."""

    @cached_property
    def missing_dumps(self) -> tuple[int, ...]:
        """Ranks that groups have as members and that left no dump."""
        return tuple(sorted({rank for group in self.groups for rank in group.members} - set(self.dumps)))

    @cached_property
    def progress(self) -> dict[Group, dict[int, Member]]:
        """What each rank with a dump did in each of its groups."""
        return {group: self._progress_in(group) for group in self.groups}

    def _progress_in(self, group: Group) -> dict[int, Member]:
        calls = {
            rank: [call for call in self._calls.get((rank, group.name), ()) if call.description == group.description]
            for rank in group.members
            if rank in self.dumps
        }
        # The library's status counts collectives and messages of a group in one: with messages it says nothing.
        with_messages = any(call.point_to_point for made in calls.values() for call in made)
        members = {}
        for rank, made in calls.items():
            collectives: dict[int, list[Call]] = defaultdict(list)
            for call in made:
                if not call.point_to_point:
                    collectives[call.sequence].append(call)
            enqueued, finished = (-1, -1) if with_messages else self._status(rank, group, made)
            members[rank] = Member(
                calls={sequence: tuple(batch) for sequence, batch in collectives.items()},
                messages=tuple(call for call in made if call.peer is not None),
                last=max((enqueued, *(call.sequence for call in made))),
                last_finished=finished,
            )
        return members

    @cached_property
    def _calls(self) -> dict[tuple[int, str], list[Call]]:
        calls: dict[tuple[int, str], list[Call]] = defaultdict(list)
        for rank, dump in self.dumps.items():
            for call in dump.calls:
                calls[rank, call.group].append(call)
        return calls

    def _status(self, rank: int, group: Group, made: list[Call]) -> tuple[int, int]:
        dump = self.dumps[rank]
        key = made[0].status_key if made else _status_keys(dump).get(group.name, "")
        return dump.status.get(key, (-1, -1))


def job_of(dumps: Mapping[int, Dump]) -> Job:
    """The job that ``dumps`` by rank belong to."""
    groups: dict[Group, None] = {}
    used: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, dump in sorted(dumps.items()):
        for name, members in dump.members.items():
            groups.setdefault(Group(name, dump.descriptions.get(name, ""), members))
        for name, description in {
            (call.group, call.description) for call in dump.calls if call.group not in dump.members
        }:
            used[name, description].append(rank)
    for (name, description), ranks in used.items():
        members = tuple(sorted(dumps)) if description == WORLD else tuple(ranks)
        groups.setdefault(Group(name, description, members))
    return Job(dumps, tuple(groups), members_told=not used)


def axis_named(description: str) -> str:
    """The mesh axis in a group's description, as Megatron (``TENSOR_MODEL_PARALLEL_GROUP``) or DeviceMesh spell it."""
    if mesh := re.fullmatch(r"mesh_([a-z_0-9]+)", description):
        return mesh[1]
    if description == WORLD:
        return "world"
    words = re.split(r"[^a-z]+", description.lower())
    if "embedding" in words:
        return "embedding"
    axes = (
        ("expert", "ep"),
        ("pipeline", "pp"),
        ("context", "cp"),
        ("sequence", "sp"),
        ("tensor", "tp"),
        ("data", "dp"),
        ("model", "mp"),
    )
    # "WITH_CP" and "AND_CONTEXT" say what else the ranks of the group are spread over.
    named = [axis for word, axis in axes if word in words]
    if "expert" in words and "data" in words:
        return "ep_dp"
    if "tensor" in words and "data" in words:
        return "dp_tp"
    short = [word for word in words if word in ("tp", "pp", "dp", "cp", "ep", "sp", "fsdp", "ddp", "hsdp")]
    return next(iter([*named, *short]), "")


def _status_keys(dump: Dump) -> dict[str, str]:
    """Groups' keys in the library's status, of a rank that has no call to tell them.

    The library numbers the groups in the order in which they were made, which the names, numbers themselves, follow.
    """
    names = [name for name in dump.members if name.isdigit()]
    keys = [key for key in dump.status if key.isdigit()]
    if len(names) != len(keys) or len(names) != len(dump.members):
        return {}
    return dict(zip(sorted(names, key=int), sorted(keys, key=int), strict=True))
