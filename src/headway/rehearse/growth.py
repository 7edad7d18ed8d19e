"""How what is outside of the repeated blocks grows with their number: lists of all parameters, and what they make."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from headway.rehearse.record import Access, Allocation, Attention, Facts, Operator, Product
from headway.rehearse.runs import NotPeriodic, Runs

Sized = TypeVar("Sized", Product, Attention, Facts)


class Growth:
    """Linear in the number of blocks: by what one more block of each series adds, ``copies`` times."""

    def __init__(self, base: Runs, longer: Sequence[Runs], copies: Sequence[int]) -> None:
        self._base = base
        self._longer = longer
        self._copies = copies
        several = (base, *longer)
        self._operators = [_fixed_operators(runs) for runs in several]
        self._allocations = [_fixed_allocations(runs) for runs in several]
        for found in (self._operators, self._allocations):
            if len({len(some) for some in found}) > 1:
                raise NotPeriodic("one block more makes another number of operators or allocations outside of blocks")
        self._places = {id(allocation): place for place, allocation in enumerate(self._allocations[0])}

    def of_operator(self, number: int) -> Operator:
        """The fixed operator ``number`` of the base record, grown, but for what it does to blocks' storages."""
        base, *longer = (operators[self._base.places[number].offset] for operators in self._operators)
        if any(other.name != base.name for other in longer):
            raise NotPeriodic(f"one block more puts another operator in the place of {base.name} outside of blocks")
        work = base.work
        if work is not None:
            work = grown(work, [other.work for other in longer], self._copies)  # type: ignore[misc, type-var]
        collective = base.collective
        if collective is not None:
            sizes = [other.collective.bytes for other in longer if other.collective is not None]
            collective = replace(collective, bytes=linear(collective.bytes, sizes, self._copies))
        return replace(
            base,
            flops=linear(base.flops, [other.flops for other in longer], self._copies),
            reads=self._accesses(base.reads, [other.reads for other in longer]),
            writes=self._accesses(base.writes, [other.writes for other in longer]),
            work=work,
            collective=collective,
        )

    def of_allocation(self, allocation: Allocation) -> int:
        """Bytes of a fixed allocation of the base record, grown."""
        place = self._places.get(id(allocation))
        if place is None:
            return allocation.bytes
        base, *longer = (some[place].bytes for some in self._allocations)
        return linear(base, longer, self._copies)

    def _accesses(self, base: tuple[Access, ...], longer: list[tuple[Access, ...]]) -> tuple[Access, ...]:
        of_others = [_fixed_accesses(some, runs) for some, runs in zip(longer, self._longer, strict=True)]
        own = _fixed_accesses(base, self._base)
        if any(len(some) != len(own) for some in of_others):
            raise NotPeriodic("one block more makes an operator outside of blocks touch other storages")
        sizes = iter([linear(a.bytes, [some[k].bytes for some in of_others], self._copies) for k, a in enumerate(own)])
        fixed = {id(access) for access in own}
        return tuple(Access(a.storage, next(sizes)) if id(a) in fixed else a for a in base)


def linear(base: int, longer: Sequence[int], copies: Sequence[int]) -> int:
    """``base`` and, for each series, ``copies`` times what one more block adds."""
    return base + sum(number * (more - base) for more, number in zip(longer, copies, strict=True))


def grown(base: Sized, longer: Sequence[Sized], copies: Sequence[int]) -> Sized:
    """The integers of a dataclass, grown one by one."""
    changes = {}
    for field in fields(base):
        value = getattr(base, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            changes[field.name] = linear(value, [getattr(other, field.name) for other in longer], copies)
    return replace(base, **changes)  # type: ignore[arg-type]


def _fixed_operators(runs: Runs) -> list[Operator]:
    return [
        token.operator for run in runs.runs if run.block is None for token in run.tokens if token.operator is not None
    ]


def _fixed_allocations(runs: Runs) -> list[Allocation]:
    return [
        token.allocation
        for run in runs.runs
        if run.block is None
        for token in run.tokens
        if token.kind == "allocate"
        and token.allocation is not None
        and runs.owners[token.allocation.storage].block is None
    ]


def _fixed_accesses(accesses: tuple[Access, ...], runs: Runs) -> list[Access]:
    owners = [runs.owners.get(access.storage) for access in accesses]
    return [a for a, owner in zip(accesses, owners, strict=True) if owner is None or owner.block is None]
