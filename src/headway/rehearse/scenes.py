"""What a segment of a step does, told so that it can be done again for another micro-batch.

A scene is a segment without numbers of its own: operators and storages that come from elsewhere are told by what they
are to the segment. Where several descriptions fit, those that fit all segments of the same context are kept.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.rehearse.contexts import Context, Label, contexts
from headway.rehearse.record import Record, Segment
from headway.rehearse.recorder import MARK
from headway.rehearse.runs import NotPeriodic
from headway.rehearse.tokens import Token, tokens_of

Origin = tuple[Any, ...]
"""What a thing is to a segment: see ``PREFERRED``."""
PREFERRED = (
    "own", "mark", "takes", "batch", "pass", "handed", "only", "back", "back from its end", "tail", "fixed",
)  # fmt: skip
"""First words of origins. ``own``: its nth one; ``takes``: handed to it; ``batch``: of the data of its micro-batch;
``pass``: of another segment of its stage and micro-batch; ``handed``: to such a one; ``only``: of the one segment of
some context; ``back``: of the nth segment before it on its stage, counted from that one's beginning or end; ``tail``:
the last operator on a lane before it; ``mark``: all that the main stream waited for before it; ``fixed``: there before
all segments."""
FARTHEST = 4
"""Segments back that are looked at."""
Key = tuple[int, Context]
"""Stage and context of a segment."""


@dataclass
class Part:
    """Tokens of a segment, of what comes before all or of what comes after them."""

    segment: Segment | None
    key: Key | None
    tokens: list[Token] = field(default_factory=list)
    tail: dict[str, int] = field(default_factory=dict)
    """Lane -> the last operator on it before this part."""
    mark: int = -1
    """Number of the mark before it."""
    first: int = -1
    """Number of its first operator."""


@dataclass
class Scene:
    """A segment that can be done again."""

    part: Part
    storages: dict[int, Origin]
    operators: dict[int, Origin]
    """That its operators and host reads wait for, own ones and those before on the same lane left out."""
    after: dict[int, tuple[int, ...]]
    """Those of each of its operators."""
    end: tuple[int, ...]
    """Operators, as in ``operators`` or own ones, that the main stream waits for when it has ended."""


class Scenes:
    """A record of few micro-batches taken apart. ``orders``: of all micro-batches, by stage; ``depth``: of contexts."""

    def __init__(self, record: Record, orders: dict[int, list[Label]], depth: int) -> None:
        self.record = record
        self.before, self.parts, self.after = _parts(record, depth)
        self._number_of = {number: place for place, part in enumerate(self.parts) for number in _operators(part)}
        self.birth: dict[int, tuple[int, int]] = {}
        """Storage -> the part in which it was made, and which of its new ones it is."""
        self.data, self.data_of = _data(record, self.before)
        self._born = [0] * len(self.parts)
        self._operators_of = [len(_operators(part)) for part in self.parts]
        self._handed = {
            (part.segment.stage, part.segment.micro_batch, storage): (part.segment.kind, place)
            for part in reversed(self.parts)
            if part.segment is not None
            for place, storage in enumerate(part.segment.takes)
        }
        self._find_births()
        self._ordinals = self._on_stages()
        self.unique = {
            (stage, context)
            for stage, order in orders.items()
            for context, count in _counted(contexts([kind for kind, _, _ in order], depth)).items()
            if count == 1
        }
        self.scenes: dict[Key, Scene] = {}
        by_key: defaultdict[Key, list[int]] = defaultdict(list)
        for place, part in enumerate(self.parts):
            assert part.key is not None
            by_key[part.key].append(place)
        for key, places in by_key.items():
            self.scenes[key] = self._scene(places)
        self.last_of = {key: places[-1] for key, places in by_key.items()}

    def place_of(self, number: int) -> int | None:
        """The part that an operator is of."""
        return self._number_of.get(number)

    def _find_births(self) -> None:
        firsts: dict[int, int] = {}
        for allocation in self.record.allocations:
            firsts.setdefault(allocation.storage, id(allocation))
        for place, part in enumerate(self.parts):
            for token in part.tokens:
                if token.kind == "allocate" and token.allocation is not None:
                    storage = token.allocation.storage
                    if firsts[storage] == id(token.allocation):
                        self.birth[storage] = place, self._born[place]
                        self._born[place] += 1

    def _on_stages(self) -> list[int]:
        """Which segment of its stage each part is."""
        counts: defaultdict[int, int] = defaultdict(int)
        found = []
        for part in self.parts:
            assert part.segment is not None
            found.append(counts[part.segment.stage])
            counts[part.segment.stage] += 1
        return found

    def _relations(self, place: int, other: int) -> set[Origin]:
        """What part ``other`` is to part ``place``."""
        one, two = self.parts[place].segment, self.parts[other].segment
        assert one is not None
        assert two is not None
        found: set[Origin] = set()
        if one.stage == two.stage:
            if one.micro_batch == two.micro_batch >= 0:
                found.add(("pass", two.kind))
            back = self._ordinals[place] - self._ordinals[other]
            if 0 < back <= FARTHEST:
                found.add(("back", back))
        key = self.parts[other].key
        if key in self.unique:
            found.add(("only", key))
        return found

    def _storage_origins(self, place: int, storage: int) -> set[Origin]:
        segment = self.parts[place].segment
        assert segment is not None
        found: set[Origin] = {("takes", n) for n, one in enumerate(segment.takes) if one == storage}
        if storage in self.birth:
            other, ordinal = self.birth[storage]
            if other == place:
                return {("own", ordinal)}
            return found | self._counted(place, other, ordinal, self._born[other])
        handed = self._handed.get((segment.stage, segment.micro_batch, storage))
        if handed is not None and handed[0] != segment.kind:
            found.add(("handed", *handed))
        label = self.data.get(storage)
        if label is not None and label[0] == segment.micro_batch:
            found.add(("batch", label[1]))
        return found | {("fixed", storage)}

    def _operator_origins(self, place: int, number: int) -> set[Origin]:
        part = self.parts[place]
        found: set[Origin] = set()
        operator = self.record.operators[number]
        if operator.name == MARK:
            marks = [one.mark for one in self.parts]
            other = marks.index(number) if number in marks else -1
            return {("mark", place - other)} if other >= 0 else set()
        if part.tail.get(operator.lane) == number:
            found.add(("tail", operator.lane))
        other = self._number_of.get(number, -1)
        if other < 0:
            return found | {("fixed", number)}
        if other == place:
            return {("own", number - part.first)}
        first, count = self.parts[other].first, self._operators_of[other]
        return found | self._counted(place, other, number - first, count)

    def _counted(self, place: int, other: int, ordinal: int, count: int) -> set[Origin]:
        """Origins of the thing that is number ``ordinal`` of ``count`` in part ``other``."""
        found: set[Origin] = {(*relation, ordinal) for relation in self._relations(place, other)}
        from_end: set[Origin] = {("back from its end", way[1], count - ordinal) for way in found if way[0] == "back"}
        return found | from_end

    def _scene(self, places: list[int]) -> Scene:
        scenes = [self._described(place) for place in places]
        storages, operators, after, end = scenes[0]
        part = self.parts[places[0]]
        for other, (own, waits, their_after, their_end) in zip(places[1:], scenes[1:], strict=True):
            _check_alike(part, self.parts[other])
            _intersect(storages, own)
            pairs = [*zip(after.items(), their_after.items(), strict=True), ((-1, end), (-1, their_end))]
            for (_, one), (_, two) in pairs:
                _match(one, operators, two, waits)
        return Scene(
            part,
            {storage: _best(origins) for storage, origins in storages.items()},
            {number: _best(origins) for number, origins in operators.items()},
            after,
            end,
        )

    def _described(
        self, place: int
    ) -> tuple[dict[int, set[Origin]], dict[int, set[Origin]], dict[int, tuple[int, ...]], tuple[int, ...]]:
        part = self.parts[place]
        storages: dict[int, set[Origin]] = {}
        after: dict[int, tuple[int, ...]] = {}
        tail = dict(part.tail)
        for token in part.tokens:
            if token.operator is not None:
                operator = token.operator
                for access in (*operator.reads, *operator.writes):
                    if access.storage not in storages:
                        storages[access.storage] = self._storage_origins(place, access.storage)
                before = tail.get(operator.lane)
                after[token.number] = tuple(n for n in operator.after if n != before or n == part.mark)
                tail[operator.lane] = token.number
            elif token.allocation is not None and token.allocation.storage not in storages:
                storages[token.allocation.storage] = self._storage_origins(place, token.allocation.storage)
            elif token.read is not None:
                after[-1 - token.read.before] = token.read.after
        assert part.segment is not None
        for storage in part.segment.gives:
            if storage not in storages:
                storages[storage] = self._storage_origins(place, storage)
        marks = [one.mark for one in self.parts[place + 1 :]][:1] or [self.after.mark]
        end = self.record.operators[marks[0]].after if marks[0] >= 0 else ()
        waits = {
            number: self._operator_origins(place, number)
            for number in {*end, *(n for some in after.values() for n in some)}
        }
        return storages, waits, after, tuple(end)


def _counted(values: Sequence[Context]) -> dict[Context, int]:
    found: dict[Context, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found


def _operators(part: Part) -> list[int]:
    return [token.number for token in part.tokens if token.operator is not None]


def _best(origins: set[Origin]) -> Origin:
    if not origins:
        raise NotPeriodic("a segment depends on what is of no other that it could be told by")
    return min(origins, key=lambda origin: (PREFERRED.index(str(origin[0])), str(origin)))


def _intersect(known: dict[int, set[Origin]], other: dict[int, set[Origin]]) -> None:
    """Keep of ``known`` what is said of the things in the same places of ``other`` too."""
    if len(known) != len(other):
        raise NotPeriodic("segments of one context touch different numbers of storages")
    for (storage, origins), theirs in zip(known.items(), other.values(), strict=True):
        origins &= theirs
        if not origins:
            raise NotPeriodic(f"storage {storage} is something else to another segment of the same context")


def _match(
    one: tuple[int, ...],
    known: dict[int, set[Origin]],
    two: tuple[int, ...],
    other: dict[int, set[Origin]],
) -> None:
    """Pair the operators of two sets by what both of a pair can be."""
    left = list(two)
    if len(one) != len(two):
        raise NotPeriodic("segments of one context wait for different numbers of operators")
    for number in one:
        best = max(left, key=lambda candidate: len(known[number] & other[candidate]))
        known[number] &= other[best]
        left.remove(best)
        if not known[number]:
            raise NotPeriodic(f"operator {number} is something else to another segment of the same context")


def _check_alike(one: Part, other: Part) -> None:
    """Raises NotPeriodic unless both do the same."""
    if len(one.tokens) != len(other.tokens):
        raise NotPeriodic("segments of one context are of different lengths")
    for mine, theirs in zip(one.tokens, other.tokens, strict=True):
        if mine.kind != theirs.kind or not _same(mine, theirs):
            raise NotPeriodic(f"segments of one context differ: {mine} and {theirs}")


def _same(one: Token, other: Token) -> bool:
    a, b = one.operator, other.operator
    if a is not None and b is not None:
        return (a.name, a.lane, a.phase, a.module, a.flops, a.work, a.collective) == (
            b.name,
            b.lane,
            b.phase,
            b.module,
            b.flops,
            b.work,
            b.collective,
        ) and [access.bytes for access in (*a.reads, *a.writes)] == [x.bytes for x in (*b.reads, *b.writes)]
    c, d = one.allocation, other.allocation
    if c is not None and d is not None:
        return (c.bytes, c.module, c.lane) == (d.bytes, d.module, d.lane)
    return True


def _parts(record: Record, depth: int) -> tuple[Part, list[Part], Part]:
    """What comes before the segments, they, and what comes after them; what is freed between them is of the earlier."""
    before, after = Part(None, None), Part(None, None)
    parts: list[Part] = []
    tail: dict[str, int] = {}
    mark, now = -1, before
    left = sum(s.kind not in ("prepare", "absent") for s in record.segments)
    marked = any(operator.name == MARK for operator in record.operators)
    inside = skipping = False
    for token in tokens_of(record):
        segment = token.segment
        if segment is not None and segment.kind == "prepare":
            now.tokens.append(token)
        elif segment is not None and segment.kind == "absent":
            skipping = token.kind == "open"
        elif token.kind == "open":
            assert segment is not None
            now, inside = Part(segment, None, [], dict(tail), mark, segment.first), True
            parts.append(now)
        elif token.kind == "close":
            inside, left = False, left - 1
            if not left and not marked:
                now = after
                after.tail = dict(tail)
        elif token.operator is not None and token.operator.name == MARK:
            mark = token.number
            tail[token.operator.lane] = mark
            if now is before:
                before.mark = mark
                now = Part(None, None)
            if not left:
                now = after
                after.mark, after.tail = mark, dict(tail)
        elif skipping:
            continue
        else:
            if parts and not inside and now is not after and token.kind == "free":
                parts[-1].tokens.append(token)
            elif inside or now is before or now is after:
                now.tokens.append(token)
            if token.operator is not None:
                tail[token.operator.lane] = token.number
    kinds: defaultdict[int, list[str]] = defaultdict(list)
    for part in parts:
        assert part.segment is not None
        kinds[part.segment.stage].append(part.segment.kind)
    named = {stage: iter(contexts(own, depth)) for stage, own in kinds.items()}
    for part in parts:
        assert part.segment is not None
        part.key = part.segment.stage, next(named[part.segment.stage])
    return before, parts, after


def _data(record: Record, before: Part) -> tuple[dict[int, tuple[int, Origin]], dict[tuple[int, Origin], int]]:
    """Storages of the data of micro-batches -> micro-batch and what they are of it; and back."""
    found: dict[int, tuple[int, Origin]] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    for allocation in record.allocations:
        if allocation.category == "batch" and allocation.allocated_event < 0:
            found[allocation.storage] = counts[allocation.module], ("given", allocation.module)
            counts[allocation.module] += 1
    number, ordinal = -1, 0
    for token in before.tokens:
        if token.kind == "open" and token.segment is not None:
            number, ordinal = token.segment.micro_batch, 0
        elif token.kind == "close":
            number = -1
        elif token.kind == "allocate" and token.allocation is not None and number >= 0:
            found[token.allocation.storage] = number, ("prepared", ordinal)
            ordinal += 1
    return found, {label: storage for storage, label in found.items()}
