"""Inputs of one kind, read one by one, and explanations put side by side."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headway.errors import UserError
from headway.explain.finding import Explained, HealthMessage, Severity
from headway.explain.input import Input

T = TypeVar("T")


def read_each(
    inputs: Sequence[Input], read: Callable[[Path], T], severity: Severity = Severity.WARNING
) -> tuple[list[T], list[HealthMessage]]:
    """What ``read`` makes of each input that it can read, and a message of ``severity`` for each other.

    Raises UserError when it can read none.
    """
    found, unread = [], []
    for one in inputs:
        try:
            found.append(read(one.path))
        except UserError as error:
            unread.append(HealthMessage("unreadable", severity, str(error), str(one.path)))
    if not found:
        raise UserError("\n".join(message.text for message in unread))
    return found, unread


def side_by_side(parts: Iterable[Explained], told: Sequence[HealthMessage] = ()) -> Explained:
    """All that ``parts`` say, after the messages ``told``. Lists of one name in their details become one."""
    parts = list(parts)
    details: dict[str, Any] = {}
    for part in parts:
        for name, detail in part.details.items():
            known = details.get(name)
            details[name] = [*known, *detail] if isinstance(known, list) and isinstance(detail, list) else detail
    return Explained(
        health=(*told, *(message for part in parts for message in part.health)),
        ranks=tuple(rank for part in parts for rank in part.ranks),
        findings=tuple(finding for part in parts for finding in part.findings),
        details=details,
    )
