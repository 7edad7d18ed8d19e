"""Where each thing in a record belongs: to a repeated block, its nth run, and a place in it; or to what is fixed."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from headway.rehearse.record import BEFORE, Record
from headway.rehearse.tokens import Token, tokens_of


class NotPeriodic(Exception):  # noqa: N818 - no error: the step must be rehearsed whole
    """The blocks of a record do not repeat in a way that more of them could be told from it."""


class Block(NamedTuple):
    """A repeated block: the ``index``-th of its ``series``."""

    series: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nothing needs


class Place(NamedTuple):
    """Of a token: in the nth run of a block, or among the fixed ones (no block)."""

    block: Block | None
    run: int
    offset: int


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one block, or of none."""

    block: Block | None
    tokens: list[Token]


Key = tuple[object, ...]
"""Tells the storages of a block apart; the same for the storage in its place in another block of the series."""


class Owner(NamedTuple):
    """What a storage belongs to; among fixed ones ``key`` is the place of what allocated it."""

    block: Block | None
    key: Key


class Runs:
    """A record taken apart. ``series``: paths of the blocks of each series, in order."""

    def __init__(self, record: Record, series: list[list[str]]) -> None:
        self.record = record
        self.paths = series
        self.blocks = {path: Block(s, i) for s, paths in enumerate(series) for i, path in enumerate(paths)}
        self.runs = _runs(tokens_of(record), self.blocks)
        self.places: list[Place] = [Place(None, 0, 0)] * len(record.operators)
        """Of each operator."""
        self.operators: dict[Place, int] = {}
        self._number_operators()
        self.owners: dict[int, Owner] = {}
        """By storage."""
        self._find_owners()
        self.storages = {owner: storage for storage, owner in self.owners.items()}

    def block_of(self, path: str) -> Block | None:
        """The block that a module or parameter is in."""
        while path and path not in self.blocks:
            path = path.rpartition(".")[0]
        return self.blocks.get(path)

    def numbered_runs(self) -> list[tuple[Run, int]]:
        """Each run, and how many of its block came before it."""
        seen: Counter[Block | None] = Counter()
        found = []
        for run in self.runs:
            found.append((run, seen[run.block]))
            seen[run.block] += 1
        return found

    def _number_operators(self) -> None:
        fixed = 0
        for run, number in self.numbered_runs():
            offset = 0
            for token in run.tokens:
                if token.kind != "operator":
                    continue
                if run.block is None:
                    place, fixed = Place(None, 0, fixed), fixed + 1
                else:
                    place, offset = Place(run.block, number, offset), offset + 1
                self.places[token.number] = place
                self.operators[place] = token.number

    def _find_owners(self) -> None:
        counts: Counter[Key] = Counter()
        for allocation in self.record.allocations:
            if allocation.allocated_event == BEFORE and allocation.storage not in self.owners:
                block = self.block_of(allocation.module)
                name = allocation.module
                if block is not None:
                    path = next(p for p, b in self.blocks.items() if b == block)
                    name = name.removeprefix(path)
                key: Key = (block, "before", allocation.category, name)
                self.owners[allocation.storage] = Owner(block, (*key[1:], counts[key]))
                counts[key] += 1
        fixed = 0
        for run, number in self.numbered_runs():
            ordinal = 0
            if run.block is None:
                for token in run.tokens:
                    self._follow_lists(token)
            for token in run.tokens:
                if token.kind != "allocate" or token.allocation is None or token.allocation.storage in self.owners:
                    continue
                if run.block is None:
                    self.owners[token.allocation.storage] = Owner(None, ("fixed", fixed))
                    fixed += 1
                else:
                    self.owners[token.allocation.storage] = Owner(run.block, ("run", number, ordinal))
                    ordinal += 1

    def _follow_lists(self, token: Token) -> None:
        """Of an operator on lists, outside of blocks, each result belongs to what its input belongs to."""
        operator = token.operator
        if operator is None:
            return
        read = [access.storage for access in operator.reads]
        written = [access.storage for access in operator.writes]
        if len(read) < 2 or len(read) != len(written) or set(read) & set(written):
            return
        place = self.places[token.number].offset
        seen: defaultdict[Owner, int] = defaultdict(int)
        for source, result in zip(read, written, strict=True):
            owner = self.owners.get(source)
            if owner is not None and owner.block is not None:
                self.owners[result] = Owner(owner.block, ("of", place, owner.key, seen[owner]))
                seen[owner] += 1


def _runs(tokens: list[Token], blocks: dict[str, Block]) -> list[Run]:
    """Tokens between the operators of two blocks go with the later one."""
    runs: list[Run] = []
    waiting: list[Token] = []
    for token in tokens:
        waiting.append(token)
        if token.kind == "operator" and token.operator is not None:
            block = blocks.get(token.operator.block)
            if runs and runs[-1].block == block:
                runs[-1].tokens.extend(waiting)
            else:
                runs.append(Run(block, waiting))
            waiting = []
    if waiting:
        runs.append(Run(None, waiting))
    known = set(blocks.values())
    ends = {block for block in known if block.index == 0 or block._replace(index=block.index + 1) not in known}
    return _without_gaps(runs, ends)


def _without_gaps(runs: list[Run], ends: set[Block]) -> list[Run]:
    """What runs between two neighbouring blocks, outside of both, goes with the later one.

    At the ``ends`` of a series passes turn around: what runs there between two runs of one block is no part of it.
    """
    joined: list[Run] = []
    for place, run in enumerate(runs):
        after = runs[place + 1].block if place + 1 < len(runs) else None
        before = joined[-1].block if joined else None
        if run.block is None and before is not None and after is not None and _is_inside(before, after, ends):
            runs[place + 1] = Run(after, run.tokens + runs[place + 1].tokens)
            continue
        if joined and joined[-1].block == run.block:
            joined[-1].tokens.extend(run.tokens)
        else:
            joined.append(run)
    return joined


def _is_inside(before: Block, after: Block, ends: set[Block]) -> bool:
    if before == after:
        return before not in ends
    return before.series == after.series and abs(before.index - after.index) == 1
