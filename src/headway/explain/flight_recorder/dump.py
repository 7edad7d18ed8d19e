"""One rank's flight-recorder dump as it was written: calls in the order the rank made them, groups, and status.

Layout of the file: ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` and ``FlightRecorderDetail.hpp`` of PyTorch,
versions 2.0 to 2.11; the JSON form holds the same with numbers of the status as text and 0 for times not known.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.explain.restricted_pickle import loads_plain

SEND, RECEIVE = "send", "recv"
_PEERS = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")
_LARGEST = 2**62
_MOST_MEMBERS = 1 << 20

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Frame:
    """A line of the stack that made a call."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Call:
    """One collective, or one send or receive, that a rank handed to its communication library."""

    group: str
    """Name of the process group, as this rank's library counts them."""
    description: str
    """What the program called the group: ``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_tp``; ``default_pg`` for the world."""
    backend: str
    name: str
    """``all_reduce``, ``_all_gather_base``, ``send``, …"""
    sequence: int
    """Which collective of its group, counted alike by all members."""
    record: int
    """Which call of this rank."""
    finished: bool
    """The rank has seen it finish."""
    created_ns: int | None
    """When the call was made, on the rank's clock since 1970."""
    input_sizes: Sizes
    output_sizes: Sizes
    dtypes: tuple[str, ...]
    status_key: str
    """What the library's own status calls the group."""
    point_to_point: bool = False
    peer: int | None = None
    """Of a send or receive: the other side's place in the group. A batch of them is written once more, without."""
    own_place: int | None = None
    """Of a send or receive: this rank's place in the group."""
    sent: tuple[int, ...] = ()
    """Of an all-to-all, where the dump tells (2.11): elements sent to each member."""
    received: tuple[int, ...] = ()
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Dump:
    """What one file holds."""

    path: Path
    version: str
    calls: tuple[Call, ...]
    members: Mapping[str, tuple[int, ...]]
    """Global ranks by name of the group, in the group's order; a group whose members are not told is left out."""
    descriptions: Mapping[str, str]
    status: Mapping[str, tuple[int, int]]
    """Last enqueued and last completed number by the library's own key of a group."""
    malformed: int = 0
    """Entries that can't be read: left out."""


def read_dump(path: Path) -> Dump:
    """Read one dump, pickle or JSON. Raises UserError when it can't be read or is no dump."""
    content = _content(path)
    entries = content.get("entries", [])
    if not isinstance(entries, list) or not isinstance(content.get("pg_config", {}), dict):
        raise UserError(f"{path}: not a flight-recorder dump: entries is no list or pg_config no table")
    if "pg_config" not in content and "entries" not in content:
        raise UserError(f"{path}: not a flight-recorder dump: neither entries nor pg_config is in it")
    calls = [_call(entry) for entry in entries]
    members, descriptions = _groups(content.get("pg_config", {}))
    known = [call for call in calls if call is not None]
    return Dump(
        path=path,
        version=str(content.get("version", ""))[:20],
        calls=tuple(sorted(known, key=lambda call: call.record)),
        members=members,
        descriptions=descriptions | {call.group: call.description for call in known},
        status=_status(content.get("pg_status")),
        malformed=len(calls) - len(known),
    )


def _content(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not data:
        raise UserError(f"{path}: the file is empty")
    if data[:1] == b"\x80":
        content = loads_plain(data, str(path))
    else:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise UserError(f"{path}: neither a pickle nor whole JSON: the file is damaged") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a flight-recorder dump: it holds no table")
    return content


def _call(entry: Any) -> Call | None:
    """The call of an entry; None when what identifies it can't be read."""
    if not isinstance(entry, dict):
        return None
    group, profiling_name = entry.get("process_group"), entry.get("profiling_name")
    # The number was called seq_id before version 2.1.
    sequence = _integer(entry.get("collective_seq_id", entry.get("seq_id")))
    record = _integer(entry.get("record_id"))
    if not isinstance(group, list | tuple) or len(group) != 2 or not isinstance(profiling_name, str):
        return None
    if sequence is None or record is None:
        return None
    backend, _, name = profiling_name.rpartition(":")
    peers = _PEERS.fullmatch(name)
    own, other = (int(peers[2]), int(peers[4])) if peers else (None, None)
    return Call(
        group=str(group[0]),
        description=str(group[1]),
        backend=backend,
        name=peers[1] if peers else name,
        sequence=sequence,
        record=record,
        finished=_finished(entry, backend),
        created_ns=_integer(entry.get("time_created_ns")) or None,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(str(dtype) for key in ("input_dtypes", "output_dtypes") for dtype in _items(entry.get(key))),
        status_key=str(entry.get("pg_id")),
        point_to_point=peers is not None or entry.get("is_p2p") is True,
        peer=other,
        own_place=own,
        sent=_integers(entry.get("input_split_sizes")),
        received=_integers(entry.get("output_split_sizes")),
        frames=tuple(frame for frame in map(_frame, _items(entry.get("frames"))) if frame is not None),
    )


def _finished(entry: Mapping[str, Any], backend: str) -> bool:
    # gloo's calls never leave the state "scheduled": they are retired when they end.
    return entry.get("state") == "completed" or (backend == "gloo" and entry.get("retired") is True)


def _groups(config: Mapping[Any, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    members, descriptions = {}, {}
    for key, group in config.items():
        if isinstance(group, dict):
            name = str(group.get("name", key))
            descriptions[name] = str(group.get("desc", ""))
            if ranks := _ranks(group.get("ranks")):
                members[name] = ranks
    return members, descriptions


def _ranks(ranks: Any) -> tuple[int, ...]:
    """Of ``"[0, 1, 2]"``, as PyTorch spells it, or of a list; empty when it is neither or repeats a rank."""
    found = _integers(re.findall(r"\d{1,9}", ranks) if isinstance(ranks, str) else ranks)
    return found if len(set(found)) == len(found) <= _MOST_MEMBERS and all(rank >= 0 for rank in found) else ()


def _status(status: Any) -> dict[str, tuple[int, int]]:
    known = {}
    for key, numbers in status.items() if isinstance(status, dict) else ():
        if isinstance(numbers, dict):
            enqueued = _integer(numbers.get("last_enqueued_collective"))
            completed = _integer(numbers.get("last_completed_collective"))
            if enqueued is not None and completed is not None:
                known[str(key)] = (enqueued, completed)
    return known


def _frame(frame: Any) -> Frame | None:
    if not isinstance(frame, dict):
        return None
    return Frame(str(frame.get("name", "?")), str(frame.get("filename", "?")), _integer(frame.get("line")) or 0)


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST else None


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _integers(value: Any) -> tuple[int, ...]:
    found = [_integer(item) for item in _items(value)]
    return tuple(item for item in found if item is not None) if None not in found else ()


def _sizes(value: Any) -> Sizes:
    return tuple(_integers(size) for size in _items(value))
