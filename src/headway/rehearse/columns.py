"""A Record's operators as columns: what is done to all of them at once works on these."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.rehearse.record import Access, Record

Integers = NDArray[np.int64]
Places = NDArray[np.int32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """Each of shape ``[operators]``. Columns of strings hold places in ``strings``."""

    strings: dict[str, int]
    """String -> its place; ``""`` is the first."""
    lane: Places
    name: Places
    kind: Places
    module: Places
    phase: Places
    axis: Places
    """Of a collective's group; ``""`` for what is none."""
    collective: Places
    group: Places
    communicates: Flags
    bytes_moved: Integers
    """Read and written."""
    flops: Integers
    after: Integers
    """All operators' ``after``, one behind the other."""
    after_count: Integers
    """How many of them are whose."""
    texts: tuple[str, ...] = field(init=False)
    """Place -> string."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", tuple(self.strings))

    def __len__(self) -> int:
        return len(self.lane)

    def of_kind(self, *kinds: str) -> Flags:
        """Which operators are of one of ``kinds``."""
        return np.isin(self.kind, [self.strings[kind] for kind in kinds if kind in self.strings])


def columns_of(record: Record) -> Columns:
    """One pass over the operators of ``record``."""
    operators = record.operators
    strings: dict[str, int] = {"": 0}

    def interned(values: list[str]) -> Places:
        for value in dict.fromkeys(values):
            strings.setdefault(value, len(strings))
        return np.array([strings[value] for value in values], dtype=np.int32)

    collectives = [operator.collective for operator in operators]
    axes = {key: group.axis for key, group in record.groups.items()}
    return Columns(
        strings=strings,
        lane=interned([operator.lane for operator in operators]),
        name=interned([operator.name for operator in operators]),
        kind=interned([operator.kind for operator in operators]),
        module=interned([operator.module for operator in operators]),
        phase=interned([operator.phase for operator in operators]),
        axis=interned(["" if one is None else axes[one.group] for one in collectives]),
        collective=interned(["" if one is None else one.kind for one in collectives]),
        group=interned(["" if one is None else one.group for one in collectives]),
        communicates=np.array([one is not None for one in collectives], dtype=bool),
        bytes_moved=_total_bytes([operator.reads for operator in operators])
        + _total_bytes([operator.writes for operator in operators]),
        flops=np.array([operator.flops for operator in operators], dtype=np.int64),
        after=np.array([earlier for operator in operators for earlier in operator.after], dtype=np.int64),
        after_count=np.array([len(operator.after) for operator in operators], dtype=np.int64),
    )


def _total_bytes(accesses: list[tuple[Access, ...]]) -> Integers:
    sizes = np.array([access.bytes for some in accesses for access in some], dtype=np.int64)
    stops = np.cumsum([len(some) for some in accesses], dtype=np.int64)
    totals = np.concatenate([[0], np.cumsum(sizes)])[np.concatenate([[0], stops]).astype(np.int64)]
    return np.diff(totals)
