"""A step of all micro-batches from a record of few: each segment is done again for every one that does the same.

Without a pipeline segments follow each other. With one their order, messages and the memory of messages come from the
schedule itself (``understudies.py``): of a storage that is handed from stage to stage what computes and what the
schedule holds are two owners or more, and the last of them frees it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import get_args, get_type_hints

from headway.rehearse.contexts import Label, contexts
from headway.rehearse.few_micro_batches import ABSENT
from headway.rehearse.record import BEFORE, Access, Allocation, HostRead, Operator, Record, Segment, StageAction
from headway.rehearse.recorder import MARK
from headway.rehearse.runs import NotPeriodic
from headway.rehearse.scenes import Key, Origin, Scene, Scenes
from headway.rehearse.storages import by_life
from headway.rehearse.tokens import Token, tokens_of


def of_all_micro_batches(few: Record, order: Sequence[Label], depth: int) -> Record:
    """``few`` with the segments of ``order``, one after the other. Raises NotPeriodic when they can't be told."""
    assembly = _Assembly(few, order, depth)
    assembly.begin()
    for place in range(len(order)):
        assembly.play(place, (), ())
    return assembly.finish(())


def of_all_through_stages(few: Record, played: Record, depth: int) -> Record:
    """``few`` with the segments, messages and memory of ``played``, a record of ``understudies.order_of``."""
    assembly = _Assembly(few, [segment.label for segment in played.segments], depth)
    assembly.begin()
    return _Schedule(assembly, played).merged()


ACTIONS = get_args(get_type_hints(StageAction)["kind"])


@dataclass
class _Instance:
    """A scene that has been played."""

    scene: Scene
    first: int
    """Number of its first operator."""
    own: list[int]
    """Its new storages."""
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    end: tuple[int, ...]
    """Operators that the main stream waits for after it."""
    stop: int = 0
    """One past its last operator."""


class _Assembly:
    """The record that is made, and what is there of it."""

    def __init__(self, few: Record, order: Sequence[Label], depth: int) -> None:
        by_stage: defaultdict[int, list[Label]] = defaultdict(list)
        for label in order:
            by_stage[label[1]].append(label)
        self.few = few
        self.order = order
        self.scenes = Scenes(few, by_stage, depth)
        named = {stage: iter(contexts([kind for kind, _, _ in own], depth)) for stage, own in by_stage.items()}
        self.keys: list[Key] = [(stage, next(named[stage])) for _, stage, _ in order]
        missing = [key for key in self.keys if key not in self.scenes.scenes]
        if missing:
            raise NotPeriodic(f"no segment of the record is like {missing[0]}")
        self.operators: list[Operator] = []
        self.allocations: list[Allocation] = []
        self.reads: list[HostRead] = []
        self.actions: list[StageAction] = []
        self.lanes: dict[str, int] = {}
        self.held: dict[int, Allocation] = {}
        self.events = 0
        self.next_storage = 1 + max(
            [a.storage for a in few.allocations] + [a.storage for o in few.operators for a in (*o.reads, *o.writes)]
        )
        self.by_label: dict[Label, _Instance] = {}
        self.by_key: dict[Key, _Instance] = {}
        self.on_stage: defaultdict[int, list[_Instance]] = defaultdict(list)
        self.on_free = self.free
        """What is to be done when a scene frees a storage."""

    # --- parts

    def begin(self) -> None:
        """What is there before the step, and what comes before all segments."""
        for allocation in self.few.allocations:
            if allocation.allocated_event == BEFORE:
                self.held[allocation.storage] = copy(allocation)
                self.allocations.append(self.held[allocation.storage])
        for token in self.scenes.before.tokens:
            if token.operator is not None:
                self.emit(token.operator, token.operator.after, token.operator.reads, token.operator.writes)
            elif token.read is not None:
                self.reads.append(token.read)
            else:
                self._hold(token, token.allocation.storage if token.allocation is not None else -1)

    def play(
        self,
        place: int,
        takes: tuple[int, ...],
        pending: tuple[int, ...],
        told: Callable[[tuple[int, ...]], None] = lambda gives: None,
    ) -> _Instance:
        """The segment at ``place`` of the order. ``takes``: storages; ``pending``: operators that the main stream waits
        for. ``told`` is told beforehand what it will give back."""
        label, key = self.order[place], self.keys[place]
        scene = self.scenes.scenes[key]
        segment = scene.part.segment
        assert segment is not None
        number = sum(origin[0] == "own" for origin in scene.storages.values())
        own = list(range(self.next_storage, self.next_storage + number))
        self.next_storage += number
        found = _Instance(scene, len(self.operators), own, takes, (), ())
        look = _Lookup(self, label, found, takes, pending)
        storages = {old: look.storage(origin) for old, origin in scene.storages.items()}
        waits = {old: look.operators(origin) for old, origin in scene.operators.items()}
        found.gives = tuple(storages[storage] for storage in segment.gives)
        told(found.gives)
        self._tokens(scene.part.tokens, scene.after, storages, waits, (segment.micro_batch, label[2]))
        found.stop = len(self.operators)
        if label[0] in ACTIONS:
            self.actions.append(StageAction(label[0], label[1], label[2], found.first, found.stop))  # type: ignore[arg-type]
        found.end = tuple({new for old in scene.end for new in waits[old]})
        self.by_label[label] = self.by_key[key] = found
        self.on_stage[label[1]].append(found)
        return found

    def _tokens(
        self,
        tokens: list[Token],
        after: dict[int, tuple[int, ...]],
        storages: dict[int, int],
        waits: dict[int, tuple[int, ...]],
        micro_batches: tuple[int, int],
    ) -> None:
        """``micro_batches``: that of ``tokens``, and the one in its place."""
        for token in tokens:
            operator = token.operator
            if operator is not None:
                reads = tuple([Access(storages[access.storage], access.bytes) for access in operator.reads])
                writes = tuple([Access(storages[access.storage], access.bytes) for access in operator.writes])
                needed = [new for old in after[token.number] for new in waits[old]]
                made = self.emit(operator, needed, reads, writes)
                if made.micro_batch == micro_batches[0]:
                    made.micro_batch = micro_batches[1]
            elif token.allocation is not None:
                self._hold(token, storages[token.allocation.storage])
            elif token.read is not None:
                needed = [new for old in after[-1 - token.read.before] for new in waits[old]]
                self.reads.append(HostRead(len(self.operators), tuple(sorted(set(needed))), token.read.reason))

    def finish(self, pending: tuple[int, ...]) -> Record:
        """What comes after all segments; ``pending`` as in ``play``."""
        end = _End(self, pending)
        after = self.scenes.after
        tail = dict(after.tail)
        for token in after.tokens:
            operator = token.operator
            if operator is not None:
                before = tail.get(operator.lane)
                waits = (old for old in operator.after if old != before or old == after.mark)
                needed = [new for old in waits for new in end.operators(old)]
                reads = tuple(Access(end.storage(access.storage), access.bytes) for access in operator.reads)
                writes = tuple(Access(end.storage(access.storage), access.bytes) for access in operator.writes)
                end.numbers[token.number] = len(self.operators)
                self.emit(operator, needed, reads, writes)
                tail[operator.lane] = token.number
            elif token.allocation is not None:
                self._hold(token, end.storage(token.allocation.storage))
            elif token.read is not None:
                needed = [new for old in token.read.after for new in end.operators(old)]
                self.reads.append(HostRead(len(self.operators), tuple(sorted(set(needed))), token.read.reason))
        for allocation in self.held.values():
            allocation.freed_at, allocation.freed_event, allocation.stays = len(self.operators), self.events, True
        return Record(self.few.facts, self.operators, self.allocations, dict(self.few.groups), self.reads, self.actions)

    # --- operators and memory

    def emit(
        self,
        operator: Operator,
        after: Sequence[int],
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
    ) -> Operator:
        """The next operator, which also waits for the last one on its lane."""
        made = copy(operator)
        needed = set(after)
        if operator.lane in self.lanes:
            needed.add(self.lanes[operator.lane])
        made.after, made.reads, made.writes = tuple(sorted(needed)), reads, writes
        self.lanes[operator.lane] = len(self.operators)
        self.operators.append(made)
        return made

    def _hold(self, token: Token, storage: int) -> None:
        if token.kind == "free":
            self.on_free(storage)
        elif token.kind == "allocate" and token.allocation is not None:
            self.allocate(token.allocation, storage)

    def allocate(self, like: Allocation, storage: int) -> Allocation:
        """``storage`` is filled as ``like`` was."""
        made = copy(like)
        made.storage, made.allocated_at, made.allocated_event = storage, len(self.operators), self.events
        made.stays = False
        if storage in self.held:
            raise NotPeriodic(f"storage {storage} is filled twice")
        self.held[storage] = made
        self.allocations.append(made)
        self.events += 1
        return made

    def free(self, storage: int) -> None:
        """``storage`` is emptied."""
        allocation = self.held.pop(storage, None)
        if allocation is None:
            raise NotPeriodic(f"storage {storage} is freed where it is not held")
        allocation.freed_at, allocation.freed_event = len(self.operators), self.events
        self.events += 1


@dataclass
class _Lookup:
    """What origins mean to one segment of the order."""

    assembly: _Assembly
    label: Label
    instance: _Instance
    takes: tuple[int, ...]
    pending: tuple[int, ...]

    def storage(self, origin: Origin) -> int:
        """The storage of ``origin``."""
        match origin:
            case ("own", ordinal):
                return self.instance.own[ordinal]
            case ("takes", ordinal):
                return self.takes[ordinal]
            case ("batch", what):
                return self.assembly.scenes.data_of[self.label[2], what]
            case ("fixed", storage):
                return storage
        other, ordinal = self._other(origin), origin[-1]
        if origin[0] == "handed":
            return other.takes[ordinal]
        return other.own[-ordinal if origin[0] == "back from its end" else ordinal]

    def operators(self, origin: Origin) -> tuple[int, ...]:
        """The operators of ``origin``."""
        match origin:
            case ("own", offset):
                return (self.instance.first + offset,)
            case ("tail", lane):
                last = self.assembly.lanes.get(lane)
                return () if last is None else (last,)
            case ("mark", _):
                return self.pending
            case ("fixed", number):
                return (number,)
        other, offset = self._other(origin), origin[-1]
        if origin[0] == "back from its end":
            return (other.stop - offset,)
        return (other.first + offset,)

    def _other(self, origin: Origin) -> _Instance:
        assembly, (_, stage, micro_batch) = self.assembly, self.label
        found: _Instance | None = None
        match origin:
            case ("pass", kind, _) | ("handed", kind, _):
                found = assembly.by_label.get((kind, stage, micro_batch))
            case ("back", distance, _) | ("back from its end", distance, _):
                found = assembly.on_stage[stage][-distance]
            case ("only", key, _):
                found = assembly.by_key.get(key)
        if found is None:
            raise NotPeriodic(f"{self.label} needs {origin}, which has not been")
        return found


@dataclass
class _End:
    """What things of the record of few are after all segments."""

    assembly: _Assembly
    pending: tuple[int, ...]
    storages: dict[int, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scenes, assembly = self.assembly.scenes, self.assembly
        for segment in self.assembly.few.segments:
            for kind in ("loss", "micro_batch", "last") if segment.kind == ABSENT else (segment.kind,):
                instance = assembly.by_label.get((kind, segment.stage, segment.micro_batch))
                if instance is not None and segment.gives:
                    self.storages[segment.gives[0]] = instance.gives[0]
        self._scenes = scenes

    def storage(self, storage: int) -> int:
        """Of all micro-batches, where ``storage`` is of few."""
        if storage not in self.storages:
            birth = self._scenes.birth.get(storage)
            self.storages[storage] = storage if birth is None else self._latest(birth[0]).own[birth[1]]
        return self.storages[storage]

    def operators(self, number: int) -> tuple[int, ...]:
        """Likewise."""
        if number in self.numbers:
            return (self.numbers[number],)
        if self.assembly.few.operators[number].name == MARK:
            return self.pending
        place = self._scenes.place_of(number)
        if place is None:
            return (number,)
        return (self._latest(place).first + number - self._scenes.parts[place].first,)

    def _latest(self, place: int) -> _Instance:
        key = self._scenes.parts[place].key
        assert key is not None
        return self.assembly.by_key[key]


class _Schedule:
    """Merges what a schedule does between segments with the segments."""

    def __init__(self, assembly: _Assembly, played: Record) -> None:
        self._assembly = assembly
        self._played = played
        self._storages: dict[int, int] = {}
        """Storage of ``played`` -> storage of the record that is made."""
        self._numbers: dict[int, tuple[int, ...]] = {}
        self._owners: defaultdict[int, set[object]] = defaultdict(set)
        """Of storages that are handed on: who has still to free them."""
        self._freed: list[Allocation] = []
        self._stage: object = None
        self._communicates: set[int] = {a.storage for a in played.allocations if a.category == "communication"}
        assembly.on_free = self._freed_by_stage

    def merged(self) -> Record:
        """The whole record."""
        assembly, played = self._assembly, self._played
        mark = assembly.scenes.before.mark
        start = assembly.few.operators[mark].after
        inside: list[Token] | None = None
        place = 0
        pending: tuple[int, ...] = ()
        for token in tokens_of(played):
            if token.kind == "open":
                inside = []
            elif token.kind == "close" and token.segment is not None:
                assert inside is not None
                self._segment(place, token.segment, inside)
                place, inside = place + 1, None
            elif inside is not None:
                inside.append(token)
            elif token.operator is not None and token.operator.name == MARK:
                pending = start if not token.number else self._waits(token.operator)
                self._numbers[token.number] = pending
            elif token.operator is not None:
                self._message(token.number, token.operator)
            elif token.allocation is not None:
                self._memory(token, token.allocation)
        record = assembly.finish(pending)
        for one in self._freed:
            if one.category in ("temporary", "activation"):
                made_by = record.operators[one.allocated_at]
                one.category = by_life(one, made_by.phase, made_by.micro_batch, record.operators)
        return record

    def _waits(self, operator: Operator) -> tuple[int, ...]:
        """What an operator of the schedule's record waits for, in the record that is made."""
        return tuple({new for old in operator.after for new in self._numbers[old]})

    def _segment(self, place: int, segment: Segment, inside: list[Token]) -> None:
        assembly = self._assembly
        self._stage = segment.stage
        takes = tuple(self._storages[storage] for storage in segment.takes)
        for storage in takes:
            if storage in self._owners and ("done", segment.stage) not in self._owners[storage]:
                self._owners[storage].add(segment.stage)
        pending: tuple[int, ...] = ()
        marks = [token for token in inside if token.operator is not None]
        for token in marks:
            assert token.operator is not None
            pending = self._waits(token.operator)
        for token in inside:
            if token.kind == "free" and token.allocation is not None and token.allocation.storage in self._storages:
                self._release(self._storages[token.allocation.storage], "schedule")

        def told(gives: tuple[int, ...]) -> None:
            for theirs, own in zip(segment.gives, gives, strict=True):
                self._storages[theirs] = own
                self._owners[own] |= {"schedule", segment.stage}

        instance = assembly.play(place, takes, pending, told)
        for token in marks:
            self._numbers[token.number] = instance.end
        for theirs, own in zip(segment.gives, instance.gives, strict=True):
            if theirs in self._communicates and own in assembly.held:
                assembly.held[own].category = "communication"
        freed = {t.allocation.storage for t in inside if t.kind == "free" and t.allocation is not None}
        for storage in freed.intersection(segment.gives):
            self._release(self._storages[storage], "schedule")

    def _freed_by_stage(self, storage: int) -> None:
        """A scene frees ``storage``."""
        if storage in self._owners:
            self._release(storage, self._stage)
        else:
            self._assembly.free(storage)

    def _release(self, storage: int, owner: object) -> None:
        owners = self._owners.get(storage)
        if owners is None or owner not in owners:
            return
        owners.remove(owner)
        owners.add(("done", owner))
        if all(isinstance(one, tuple) for one in owners):
            del self._owners[storage]
            self._freed.append(self._assembly.held[storage])
            self._assembly.free(storage)

    def _message(self, number: int, operator: Operator) -> None:
        after = self._waits(operator)
        reads = tuple(Access(self._storages[access.storage], access.bytes) for access in operator.reads)
        writes = tuple(Access(self._storages[access.storage], access.bytes) for access in operator.writes)
        self._numbers[number] = (len(self._assembly.operators),)
        self._assembly.emit(operator, after, reads, writes)

    def _memory(self, token: Token, allocation: Allocation) -> None:
        assembly, storage = self._assembly, allocation.storage
        if token.kind == "free":
            if storage in self._storages:
                self._release(self._storages[storage], "schedule")
            return
        if storage not in self._storages:
            self._storages[storage] = assembly.next_storage
            assembly.next_storage += 1
        own = self._storages[storage]
        assembly.allocate(allocation, own)
        self._owners[own].add("schedule")
