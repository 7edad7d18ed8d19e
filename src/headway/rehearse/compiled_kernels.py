"""Which operators of compiled blocks become one kernel, estimated from the record of the eager program.

A compiler fuses neighbouring pointwise operators, casts, norms and sums: what they hand to each other stays in
registers. It may also fuse such a chain into the product before it, and keeps other tensors for the backward pass than
the eager program does: neither is estimated here, so the bytes have a range of their own (``FUSED_RANGE``).
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from headway.rehearse.columns import Columns, Flags, Integers
from headway.rehearse.record import Access, Operator, Record

FUSED_RANGE = (0.85, 1.25)
"""Bytes of fused kernels over their estimate (judgement): chains that go into products; chains that are cut."""


@dataclass(frozen=True)
class Kernels:
    """Which kernel does an operator's work."""

    first: Integers
    """Number of the first operator of the kernel, its own for an operator that is a kernel: int64, ``[operators]``."""
    bytes_moved: Integers
    """Of the kernel that an operator is the first of; 0 for the others."""

    @property
    def launched(self) -> Flags:
        """Which operators are a kernel, or the first of one."""
        return self.first == np.arange(len(self.first))

    @property
    def fused(self) -> Flags:
        """Which operators are the first of several that became one kernel."""
        count: Integers = np.bincount(self.first, minlength=len(self.first))
        return count > 1


def kernels_of(record: Record, columns: Columns, before: Integers, tied: Flags) -> Kernels:
    """The kernels of ``record``: its operators, but for chains of fusible neighbours in compiled blocks.

    ``before``: the operator before each on its lane, -1 for none; ``tied``: which operators can't be in one kernel with
    that, since something on another lane, or the host, is between them.
    """
    first = np.arange(len(columns), dtype=np.int64)
    moved = columns.bytes_moved.copy()
    if not record.facts.compiled:
        return Kernels(first, moved)
    operators = record.operators
    chain: dict[int, list[int]] = {}
    for number, operator in enumerate(operators):
        earlier = int(before[number])
        if earlier >= 0 and not tied[number] and _fuse(operators[earlier], operator):
            first[number] = first[earlier]
            chain.setdefault(int(first[number]), [int(first[number])]).append(number)
    last_read = {access.storage: number for number, operator in enumerate(operators) for access in operator.reads}
    for beginning, members in chain.items():
        moved[members] = 0
        moved[beginning] = _bytes_of_chain([operators[member] for member in members], members[-1], last_read)
    return Kernels(first, moved)


def _fuse(one: Operator, other: Operator) -> bool:
    return (
        one.fusible
        and other.fusible
        and one.block == other.block != ""
        and one.phase == other.phase
        and one.micro_batch == other.micro_batch
    )


def _bytes_of_chain(chain: list[Operator], last: int, last_read: dict[int, int]) -> int:
    """Bytes of what is read but not made in the chain, and of what is made and read after operator ``last``."""
    given: dict[int, int] = {}
    made: dict[int, int] = {}
    for operator in chain:
        for storage, size in _by_storage(operator.reads).items():
            if storage not in made:
                given[storage] = max(size, given.get(storage, 0))
        for storage, size in _by_storage(operator.writes).items():
            made[storage] = max(size, made.get(storage, 0))
    kept = sum(size for storage, size in made.items() if last_read.get(storage, -1) > last or storage in given)
    return sum(given.values()) + kept


def _by_storage(accesses: tuple[Access, ...]) -> Counter[int]:
    """Bytes of each storage: an operator may touch several parts of one."""
    total: Counter[int] = Counter()
    for access in accesses:
        total[access.storage] += access.bytes
    return total
