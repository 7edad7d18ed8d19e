"""A record as one sequence: operators, allocations, frees, host reads, actions and segments as the host has them."""

from dataclasses import dataclass, replace
from typing import Literal

from headway.rehearse.record import BEFORE, Access, Allocation, HostRead, Operator, Record, Segment, StageAction

Kind = Literal["operator", "allocate", "free", "read", "begin", "end", "open", "close"]


@dataclass(frozen=True, slots=True)
class Token:
    """One thing that the host did."""

    kind: Kind
    operator: Operator | None = None
    number: int = -1
    """Of the operator."""
    allocation: Allocation | None = None
    read: HostRead | None = None
    action: StageAction | None = None
    segment: Segment | None = None


def tokens_of(record: Record) -> list[Token]:
    """Everything that happens in the step; what is there before it is left out."""
    events: list[tuple[int, float, Token]] = []
    for allocation in record.allocations:
        if allocation.allocated_event != BEFORE:
            token = Token("allocate", allocation=allocation)
            events.append((allocation.allocated_at, allocation.allocated_event, token))
        if not allocation.stays:
            events.append((allocation.freed_at, allocation.freed_event, Token("free", allocation=allocation)))
    before_any, after_any = -1, len(events)
    for one in record.segments:  # between two events
        events.append((one.stop, one.stop_event - 0.5, Token("close", segment=one)))
        events.append((one.first, one.first_event - 0.5, Token("open", segment=one)))
    events += [(action.stop, before_any, Token("end", action=action)) for action in record.actions]
    events += [(action.first, after_any, Token("begin", action=action)) for action in record.actions]
    events += [(read.before, after_any, Token("read", read=read)) for read in record.host_reads]
    events += [
        (number, after_any + 1, Token("operator", operator, number)) for number, operator in enumerate(record.operators)
    ]
    events.sort(key=lambda event: event[:2])
    return [token for _, _, token in events]


def renumbered(record: Record) -> Record:
    """The same step with storages numbered in the order in which the step meets them: equal steps become equal."""
    serials: dict[int, int] = {}

    def serial(storage: int) -> int:
        return serials.setdefault(storage, len(serials))

    def accesses(given: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(Access(serial(access.storage), access.bytes) for access in given)

    operators = [replace(o, reads=accesses(o.reads), writes=accesses(o.writes)) for o in record.operators]
    untouched = sorted(record.allocations, key=lambda a: (a.allocated_event, a.module, a.category))
    allocations = [replace(a, storage=serial(a.storage)) for a in untouched]
    return replace(record, operators=operators, allocations=sorted(allocations, key=_order), segments=[])


def _order(allocation: Allocation) -> tuple[int, int]:
    return allocation.allocated_event, allocation.storage
