"""A whole step from the step of a model with few blocks: the regular block's part of it is repeated.

Nothing is assumed of what a block does. In a record of a model with few blocks one block, whose neighbours are regular
too, stands for all that are left out: its operators, allocations and frees are repeated after (in backward passes:
before) its own, and each copy depends on its neighbours as the template does on its own. What is outside of the blocks
but grows with their number (lists of all parameters) grows by what one more block adds in a second, longer record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.rehearse.growth import Growth
from headway.rehearse.record import BEFORE, Access, Allocation, Facts, HostRead, Operator, Record, Segment, StageAction
from headway.rehearse.runs import Block, NotPeriodic, Owner, Run, Runs
from headway.rehearse.tokens import Token


@dataclass(frozen=True)
class Series:
    """Blocks that follow each other and, but for the first and last ones, do the same."""

    paths: list[str]
    """In the record."""
    template: int
    """The block to repeat; the one before it and the one after it must be regular."""
    copies: int
    whole: list[str]
    """Paths of all blocks of the extended record."""

    def shifted(self, index: int) -> int:
        """Where a block of the record is in the extended one."""
        return index if index <= self.template else index + self.copies


@dataclass(frozen=True)
class Longer:
    """A record with one more block of one series."""

    series: int
    """Which."""
    runs: Runs


def extended(base: Runs, longer: Sequence[Longer], series: Sequence[Series], facts: Facts) -> Record:
    """``base`` with the copies of each series.

    ``longer``: one for each series that may have copies. Raises NotPeriodic when the blocks do not repeat.
    """
    return _Extension(base, longer, series).record(facts)


@dataclass(frozen=True)
class _Emitted:
    """A token of the extended record."""

    token: Token
    source: Block | None
    """The block that the token is of in the base record."""
    block: Block | None
    """The block that it is of in the extended one."""


class _Extension:
    def __init__(self, base: Runs, longer: Sequence[Longer], series: Sequence[Series]) -> None:
        self.base = base
        self.series = series
        self.growth = Growth(base, [one.runs for one in longer], [series[one.series].copies for one in longer])
        self.emitted: list[_Emitted] = []
        self.numbers: dict[tuple[Block | None, int, int], int] = {}
        """(block of the extended record, run, offset) -> number there."""
        self.serials: dict[tuple[Block | None, object], int] = {}
        self._next_serial = max(base.owners, default=0) + 1

    def record(self, facts: Facts) -> Record:
        for place, (run, _) in enumerate(self.base.numbered_runs()):
            self._emit(place, run)
        self._number()
        operators = [self._operator(e) for e in self.emitted if e.token.operator is not None]
        allocations, reads, actions, segments = self._events(len(operators))
        return Record(facts, operators, allocations, dict(self.base.record.groups), reads, actions, segments)

    # --- which tokens there are

    def _emit(self, place: int, run: Run) -> None:
        if run.block is None:
            self._emit_fixed(run)
            return
        one = self.series[run.block.series]
        own = [
            _Emitted(token, run.block, run.block._replace(index=one.shifted(run.block.index))) for token in run.tokens
        ]
        if run.block.index != one.template:
            self.emitted += own
            return
        copies = [
            [_Emitted(token, run.block, run.block._replace(index=one.template + copy)) for token in run.tokens]
            for copy in range(1, one.copies + 1)
        ]
        parts = [own, *copies]
        if not self._ascends(place, run.block):
            parts.reverse()
        for part in parts:
            self.emitted += part

    def _ascends(self, place: int, block: Block) -> bool:
        """Whether later blocks run after this one here, as in a forward pass."""
        runs = self.base.runs
        before = runs[place - 1].block if place else None
        after = runs[place + 1].block if place + 1 < len(runs) else None
        for neighbour, sign in ((before, 1), (after, -1)):
            if neighbour is not None and neighbour.series == block.series:
                return (block.index - neighbour.index) * sign > 0
        raise NotPeriodic(f"block {block.index} runs apart from its neighbours")

    def _emit_fixed(self, run: Run) -> None:
        """What is allocated or freed for the template is so for each copy too: after it, or before it."""
        tokens = run.tokens
        owners = [self._owner_of(token) for token in tokens]
        start = 0
        while start < len(tokens):
            owner = owners[start]
            stop = start + 1
            while stop < len(tokens) and owners[stop] == owner and owner is not None:
                stop += 1
            some = tokens[start:stop]
            if owner is None:
                self.emitted += [_Emitted(token, None, None) for token in some]
            else:
                one = self.series[owner.series]
                indices = [one.shifted(owner.index)]
                if owner.index == one.template:
                    indices += [one.template + copy for copy in range(1, one.copies + 1)]
                    before = owners[start - 1] if start else None
                    if before is not None and before.series == owner.series and before.index > owner.index:
                        indices.reverse()
                for index in indices:
                    self.emitted += [_Emitted(token, owner, owner._replace(index=index)) for token in some]
            start = stop

    def _owner_of(self, token: Token) -> Block | None:
        """The block for which something is allocated or freed outside of the blocks."""
        if token.allocation is None:
            return None
        return self.base.owners[token.allocation.storage].block

    # --- what they are called

    def _number(self) -> None:
        number = 0
        for emitted in self.emitted:
            if emitted.token.kind == "operator":
                place = self.base.places[emitted.token.number]
                block = None if place.block is None else emitted.block
                self.numbers[block, place.run, place.offset] = number
                number += 1

    def _new_number(self, old: int, emitted: _Emitted) -> int:
        place = self.base.places[old]
        found = self.numbers.get((self._new_block(place.block, emitted), place.run, place.offset))
        if found is None:
            raise NotPeriodic(f"nothing stands where operator {old} stands")
        return found

    def _new_block(self, block: Block | None, emitted: _Emitted) -> Block | None:
        """A block as ``emitted`` means it: as far from its own as in the base record."""
        if block is None:
            return None
        if emitted.source is not None and emitted.block is not None and emitted.source.series == block.series:
            return block._replace(index=emitted.block.index + block.index - emitted.source.index)
        return block._replace(index=self.series[block.series].shifted(block.index))

    def _new_storage(self, storage: int, emitted: _Emitted) -> int:
        owner = self.base.owners.get(storage)
        if owner is None or owner.block is None:
            return storage
        return self._serial(self._new_block(owner.block, emitted), owner.key)

    def _serial(self, block: Block | None, key: object) -> int:
        """The storage of ``key`` of a block of the extended record."""
        assert block is not None
        if (block, key) not in self.serials:
            one = self.series[block.series]
            copied = one.template < block.index <= one.template + one.copies
            source = one.template if copied else block.index - (one.copies if block.index > one.template else 0)
            known = self.base.storages.get(Owner(block._replace(index=source), key))  # type: ignore[arg-type]
            if known is None:
                raise NotPeriodic(f"block {block.index} has no storage {key}")
            self.serials[block, key] = self._next_serial if copied else known
            self._next_serial += copied
        return self.serials[block, key]

    def _new_path(self, path: str, emitted: _Emitted) -> str:
        block = self.base.block_of(path)
        if block is None:
            return path
        new = self._new_block(block, emitted)
        assert new is not None
        one = self.series[block.series]
        return one.whole[new.index] + path.removeprefix(one.paths[block.index])

    # --- operators

    def _operator(self, emitted: _Emitted) -> Operator:
        operator = emitted.token.operator
        assert operator is not None
        if emitted.block is None:
            operator = self.growth.of_operator(emitted.token.number)
        after = tuple(sorted({self._new_number(number, emitted) for number in operator.after}))
        return replace(
            operator,
            after=after,
            module=self._new_path(operator.module, emitted),
            block=self._new_path(operator.block, emitted),
            reads=self._accesses(operator.reads, emitted),
            writes=self._accesses(operator.writes, emitted),
        )

    def _accesses(self, accesses: tuple[Access, ...], emitted: _Emitted) -> tuple[Access, ...]:
        """Outside of the blocks, what is done to the template's parameters is done to those of each copy."""
        if emitted.block is not None:
            return tuple(Access(self._new_storage(a.storage, emitted), a.bytes) for a in accesses)
        found: list[Access] = []
        pending: list[Access] = []
        blocks = [self._block_of(access) for access in accesses]
        for place, access in enumerate(accesses):
            found.append(Access(self._new_storage(access.storage, emitted), access.bytes))
            block = blocks[place]
            if block is not None and block.index == self.series[block.series].template:
                pending.append(access)
                if place + 1 == len(accesses) or blocks[place + 1] != block:
                    found += self._copies(pending, block)
                    pending = []
        return tuple(found)

    def _block_of(self, access: Access) -> Block | None:
        owner = self.base.owners.get(access.storage)
        return None if owner is None else owner.block

    def _copies(self, accesses: list[Access], block: Block) -> list[Access]:
        one = self.series[block.series]
        return [
            Access(self._serial(block._replace(index=one.template + copy), self.base.owners[a.storage].key), a.bytes)
            for copy in range(1, one.copies + 1)
            for a in accesses
        ]

    # --- memory, reads and actions

    def _events(self, end: int) -> tuple[list[Allocation], list[HostRead], list[StageAction], list[Segment]]:
        allocations = self._from_before()
        held = {allocation.storage: allocation for allocation in allocations}
        reads: list[HostRead] = []
        actions: list[StageAction] = []
        segments: list[Segment] = []
        opened = (0, 0)
        begun = number = event = 0
        for emitted in self.emitted:
            token = emitted.token
            if token.operator is not None:
                number += 1
            elif token.read is not None:
                after = tuple(self._new_number(old, emitted) for old in token.read.after)
                reason = self._new_path(token.read.reason, emitted)
                reads.append(HostRead(number, tuple(sorted(after)), reason))
            elif token.kind == "begin":
                begun = number
            elif token.kind == "open":
                opened = (number, event)
            elif token.segment is not None:
                segments.append(self._segment(emitted, token.segment, opened, (number, event)))
            elif token.action is not None:
                actions.append(replace(token.action, first=begun, stop=number))
            elif token.allocation is not None:
                storage = self._new_storage(token.allocation.storage, emitted)
                if token.kind == "free":
                    if storage not in held:
                        raise NotPeriodic(f"storage {storage} is freed where it is not held")
                    freed = held.pop(storage)
                    freed.freed_at, freed.freed_event, freed.stays = number, event, False
                else:
                    held[storage] = self._allocation(emitted, storage, number, event)
                    allocations.append(held[storage])
                event += 1
        for allocation in held.values():
            allocation.freed_at, allocation.freed_event, allocation.stays = end, event, True
        return allocations, reads, actions, segments

    def _segment(self, emitted: _Emitted, segment: Segment, begin: tuple[int, int], end: tuple[int, int]) -> Segment:
        return Segment(
            *segment.label,
            first=begin[0],
            stop=end[0],
            first_event=begin[1],
            stop_event=end[1],
            takes=tuple(self._new_storage(storage, emitted) for storage in segment.takes),
            gives=tuple(self._new_storage(storage, emitted) for storage in segment.gives),
        )

    def _allocation(self, emitted: _Emitted, storage: int, number: int, event: int) -> Allocation:
        allocation = emitted.token.allocation
        assert allocation is not None
        size = self.growth.of_allocation(allocation) if emitted.block is None else allocation.bytes
        return replace(
            allocation,
            storage=storage,
            bytes=size,
            module=self._new_path(allocation.module, emitted),
            allocated_at=number,
            allocated_event=event,
        )

    def _from_before(self) -> list[Allocation]:
        """What is there when the step begins, that of the copies included."""
        found: list[Allocation] = []
        for allocation in self.base.record.allocations:
            if allocation.allocated_event != BEFORE:
                continue
            owner = self.base.owners[allocation.storage]
            if owner.block is None:
                found.append(replace(allocation))
                continue
            one = self.series[owner.block.series]
            indices = [one.shifted(owner.block.index)]
            if owner.block.index == one.template:
                indices += [one.template + copy for copy in range(1, one.copies + 1)]
            for index in indices:
                emitted = _Emitted(Token("read"), owner.block, owner.block._replace(index=index))
                found.append(
                    replace(
                        allocation,
                        storage=self._new_storage(allocation.storage, emitted),
                        module=self._new_path(allocation.module, emitted),
                    )
                )
        return found
