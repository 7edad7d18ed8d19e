"""Streaming the complete events (``"ph": "X"``) of a Chrome trace into columns, a megabyte of text at a time."""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.errors import UserError
from headway.timeline.decimals import thousandths
from headway.timeline.timeline import UNKNOWN
from headway.timeline.trace_text import cuts, mended, pieces

Buffer = bytes | memoryview | msgspec.Raw
LONGEST_EVENT_BYTES = 64 << 20
LONGEST_HEAD_BYTES = 64 << 20
TEXT_CODES = np.int64(-(1 << 40))
"""A pid or tid that is a string stands in its column as this minus the string's place."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_PLACE_IN_MESSAGE = re.compile(r" \(byte (\d+)\)")
_OPENS_MEMBERS = b'{"": ['
_NOTHING = msgspec.Raw(b"")
_TRUNCATED, _TRAILING = "Input data was truncated", "trailing characters"


@dataclass(frozen=True)
class Arguments:
    """Which members of an event's ``args`` are kept: those that hold strings, and those that hold integers."""

    strings: Sequence[str]
    integers: Sequence[str]
    texts: Sequence[str] = ()
    """Members of any type, kept as the JSON that they are written in."""
    instant: str = ""
    """The name of instant events that are kept too, with ``instant_integers`` of their members; "": of none."""
    instant_integers: Sequence[str] = ()


@dataclass
class EventColumns:
    """The complete events of a trace file as columns of shape ``[events]``, in the file's order."""

    columns: dict[str, NDArray[Any]]
    """name, cat, the string arguments and the texts hold places in ``strings`` (int32; 0 where an event has none); ts
    and dur are ns; pid, tid and the integer arguments are int64 (-1 where an event has none)."""
    strings: dict[str, int] = field(default_factory=lambda: _Strings({"": 0}))
    """Place of each string, in the order of the places."""
    names: dict[tuple[str, int | str, int | str], str] = field(default_factory=dict)
    """What metadata events say: (``thread_name``, pid, tid) and the like, to the name."""
    instants: list[tuple[int, ...]] = field(default_factory=list)
    """Of the instant events that are kept: ns, and their integers; -1 for what one has not."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the file says beside its events: ``distributedInfo``, ``deviceProperties``, …"""
    left_out: Counter[str] = field(default_factory=Counter)
    """Events that are not in the columns, by their ``ph``; ``malformed``: without readable times or duration."""
    truncated: bool = False
    """The file ends in the middle: what came before is here."""
    mended: bool = False
    """Some of the text was no valid JSON, as some profilers write it, and was read nonetheless."""


def read_events(path: Path, arguments_of: Callable[[dict[str, Any]], Arguments]) -> EventColumns:
    """Read a Chrome trace (.json or gzip); ``arguments_of`` says from the file's first facts what to keep of ``args``.

    Time is linear in the file and its text is never held whole. Raises UserError when it is no such trace.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, pieces(file)).read(arguments_of)
    except zlib.error as error:
        raise UserError(f"{path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


class _Strings(dict[str, int]):
    """The place of each distinct string, given out as they come; what is no string counts as the first, ``""``."""

    def __missing__(self, text: Any) -> int:
        if not isinstance(text, str):
            return 0
        self[text] = place = len(self)
        return place


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path, text: Iterator[bytes]):
        self.path, self.text = path, text
        self.passed = 0
        """Bytes of the file before those that are being decoded."""
        self.bare = False
        """The file is an array of events and nothing else."""
        self.found = EventColumns(columns={})

    def read(self, arguments_of: Callable[[dict[str, Any]], Arguments]) -> EventColumns:
        """Read the whole file. Raises UserError."""
        rest = self._read_head()
        self.decoder = _EventDecoder(arguments_of(self.found.facts), self.found)
        ended = False
        for piece in chain([b""], self.text):
            if ended:
                rest += piece
                continue
            array = bytearray().join((b"[", rest, piece))
            taken, ended = self._take_whole_events(array)
            self.passed += taken
            rest = bytes(memoryview(array)[1 + taken :])
            if len(rest) > LONGEST_EVENT_BYTES:
                raise self._malformed(f"an event of over {LONGEST_EVENT_BYTES >> 20} MiB", before=0)
        self._read_end(rest)
        self.found.columns = self.decoder.columns()
        return self.found

    def _read_head(self) -> bytes:
        """Read what stands before the events; the text after their opening bracket."""
        head = b""
        for piece in self.text:
            head += piece
            if (begun := head.lstrip(b"\xef\xbb\xbf \t\r\n")).startswith(b"["):
                self.bare = True
                self.passed = len(head) - len(begun) + 1
                return begun[1:]
            for found in _EVENTS_KEY.finditer(head):
                try:
                    facts = msgspec.json.decode(mended(head[: found.start()] + b'"": 0}'), type=dict[str, Any])
                except msgspec.MsgspecError:
                    continue  # deeper in, or in a string
                self.found.facts = {key: value for key, value in facts.items() if key}
                self.passed = found.end()
                return head[found.end() :]
            if len(head) > LONGEST_HEAD_BYTES:
                break
        raise UserError(f"{self.path}: not a Chrome or PyTorch-profiler trace: it has no traceEvents")

    def _take_whole_events(self, array: bytearray) -> tuple[int, bool]:
        """Take the whole events of ``array``, which begins with a bracket and does not end with one.

        Returns how many bytes after the bracket were taken, and whether the file's array of events ends in ``array``.
        """
        for end, start in cuts(array):
            separator, array[end] = array[end], ord("]")
            whole = memoryview(array)[: end + 1]
            why = self.decoder.take(whole)
            if why is not None and not (_TRUNCATED in why or _TRAILING in why):
                self.found.mended = True
                if self.decoder.take(mended(bytes(whole))) is not None:
                    raise self._malformed(why, before=1)
                why = None
            array[end] = separator
            if why is None:
                return start - 1, False
            if _TRAILING in why:
                return 0, True
        return 0, False

    def _read_end(self, rest: bytes) -> None:
        """Take the last events, and what the file says after them. Raises UserError."""
        why = self._take_end(rest)
        if why is not None and _TRUNCATED not in why:
            self.found.mended = True
            if self._take_end(mended(rest)) is not None:
                raise self._malformed(why, before=1 if self.bare else len(_OPENS_MEMBERS))
        elif why is not None:
            self.found.truncated = True
            if self.decoder.take(b"[" + rest.rstrip(b", \t\r\n") + b"]") is not None:
                self._take_whole_events(bytearray(b"[" + rest))

    def _take_end(self, rest: bytes) -> str | None:
        """Take what remains when it is whole; otherwise say why it isn't."""
        if self.bare:
            return self.decoder.take(b"[" + rest)
        try:
            members = msgspec.json.decode(_OPENS_MEMBERS + rest, type=dict[str, msgspec.Raw])
            events = members.pop("")
            facts = {key: msgspec.json.decode(value) for key, value in members.items()}
        except msgspec.MsgspecError as error:
            return str(error)
        self.found.facts |= facts
        return self.decoder.take(events)

    def _malformed(self, why: str, before: int) -> UserError:
        """``before``: bytes that were put before the file's own when ``why`` was said."""
        place = _PLACE_IN_MESSAGE.search(why)
        where = self.passed + (int(place[1]) - before if place else 0)
        return UserError(f"{self.path}: not valid JSON near byte {where:,}: {_PLACE_IN_MESSAGE.sub('', why)}")


class _EventDecoder:
    """Decodes arrays of events and appends the complete ones to columns."""

    def __init__(self, arguments: Arguments, found: EventColumns):
        self.arguments, self.found = arguments, found
        args = _args_type(arguments)
        members: list[Any] = [("ph", str, ""), ("cat", str, ""), ("name", str, ""), ("pid", Any, UNKNOWN)]
        members += [("tid", Any, UNKNOWN), ("ts", Any, None), ("dur", Any, None)]
        event: Any = msgspec.defstruct("Event", [*members, ("args", args | None, None)], gc=False)
        self._without_args = args()
        self._one = msgspec.json.Decoder(event, float_hook=str)  # the text of a time, not its nearest float
        self._many = msgspec.json.Decoder(list[event], float_hook=str)
        self._parts: dict[str, list[NDArray[Any]]] = {}
        for key in ("name", "cat", *arguments.strings, *arguments.texts):
            self._parts[key] = [np.zeros(0, np.int32)]
        for key in ("ts", "dur", "pid", "tid", *arguments.integers):
            self._parts[key] = [np.zeros(0, np.int64)]

    def take(self, array: Buffer) -> str | None:
        """Take the events of a JSON array; what is no event is counted. When it is no array, take none and say why."""
        try:
            events = self._many.decode(array)
        except msgspec.ValidationError:
            try:
                events = list(self._sound_ones(array))
            except msgspec.MsgspecError as error:
                return str(error)
        except msgspec.DecodeError as error:
            return str(error)
        complete = [event for event in events if event.ph == "X"]
        if len(complete) < len(events):
            self._note([event for event in events if event.ph != "X"])
        self._append(complete)
        return None

    def _sound_ones(self, array: Buffer) -> Iterator[Any]:
        for element in msgspec.json.decode(array, type=list[msgspec.Raw]):
            try:
                yield self._one.decode(element)
            except msgspec.ValidationError:
                self.found.left_out["malformed"] += 1

    def _note(self, events: Iterable[Any]) -> None:
        """Count events that are not complete ones, and keep instants and the names that metadata events give."""
        instants = [event for event in events if event.ph == "i" and event.name == self.arguments.instant]
        times, timed = thousandths([event.ts for event in instants])
        for event, at, is_timed in zip(instants, times.tolist(), timed.tolist(), strict=True):
            if is_timed and event.args is not None:
                count = len(self.arguments.instant_integers)
                values = _integers([getattr(event.args, f"instant{i}") for i in range(count)])
                self.found.instants.append((at, *values.tolist()))
        for event in events:
            if event.ph != "M":
                self.found.left_out[event.ph or "malformed"] += 1
            elif event.args is not None and isinstance(event.pid, int | str) and isinstance(event.tid, int | str):
                self.found.names[event.name, event.pid, event.tid] = str(event.args.name or event.args.labels)

    def _append(self, events: list[Any]) -> None:
        starts, timed = thousandths([event.ts for event in events])
        durations, measured = thousandths([event.dur for event in events])
        sound = timed & measured & (durations >= 0)
        args = [event.args or self._without_args for event in events]
        columns: dict[str, NDArray[Any]] = {
            "ts": starts,
            "dur": durations,
            "name": self._strings([event.name for event in events]),
            "cat": self._strings([event.cat for event in events]),
            "pid": self._integers_or_strings([event.pid for event in events]),
            "tid": self._integers_or_strings([event.tid for event in events]),
        }
        for i, key in enumerate(self.arguments.strings):
            columns[key] = self._strings(list(map(attrgetter(f"string{i}"), args)))
        for i, key in enumerate(self.arguments.texts):
            columns[key] = self._strings(_written(list(map(attrgetter(f"text{i}"), args))))
        for i, key in enumerate(self.arguments.integers):
            columns[key] = _integers(list(map(attrgetter(f"integer{i}"), args)))
        if not sound.all():
            self.found.left_out["malformed"] += int((~sound).sum())
            columns = {key: column[sound] for key, column in columns.items()}
        for key, column in columns.items():
            self._parts[key].append(column)

    def _strings(self, values: list[Any]) -> NDArray[np.int32]:
        """Places in the strings; of what is no string, that of ``""``."""
        if not any(values):
            return np.zeros(len(values), np.int32)
        try:
            return np.fromiter(map(self.found.strings.__getitem__, values), np.int32, len(values))
        except TypeError:  # a list or an object, which can't be looked up
            return self._strings([value if isinstance(value, str) else "" for value in values])

    def _integers_or_strings(self, values: list[Any]) -> NDArray[np.int64]:
        """Integers, and strings as TEXT_CODES minus their place."""
        if str not in set(map(type, values)):
            return _integers(values)
        codes = TEXT_CODES - self._strings(values)
        return np.where(codes == TEXT_CODES, _integers(values), codes)

    def columns(self) -> dict[str, NDArray[Any]]:
        """All columns; to be called once. One that holds nothing takes no memory, and can't be written to."""
        return {key: _one_column(self._parts.pop(key)) for key in list(self._parts)}


def _args_type(arguments: Arguments) -> Any:
    """The type of an event's ``args``: the kept members and nothing else. Their names are no identifiers."""
    members: list[Any] = [
        (f"string{i}", Any, msgspec.field(name=key, default="")) for i, key in enumerate(arguments.strings)
    ]
    members += [
        (f"integer{i}", Any, msgspec.field(name=key, default=UNKNOWN)) for i, key in enumerate(arguments.integers)
    ]
    members += [
        (f"text{i}", msgspec.Raw, msgspec.field(name=key, default=_NOTHING)) for i, key in enumerate(arguments.texts)
    ]
    members += [
        (f"instant{i}", Any, msgspec.field(name=key, default=UNKNOWN))
        for i, key in enumerate(arguments.instant_integers)
    ]
    members += [("name", Any, msgspec.field(default="")), ("labels", Any, msgspec.field(default=""))]
    return msgspec.defstruct("Args", members, frozen=True, gc=False)


def _one_column(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """``parts`` one after the other; those without memory of their own hold UNKNOWN throughout."""
    if all(part.strides == (0,) or not len(part) for part in parts):
        return np.broadcast_to(np.int64(UNKNOWN), sum(map(len, parts)))
    return np.concatenate(parts)


def _written(values: list[msgspec.Raw]) -> list[str]:
    """The JSON of raw members; "" where there is none."""
    if values.count(_NOTHING) == len(values):
        return [""] * len(values)
    return [bytes(value).decode("utf-8", errors="replace") for value in values]


def _integers(values: list[Any]) -> NDArray[np.int64]:
    """Integers; -1 for what is none or does not fit."""
    if values.count(UNKNOWN) == len(values):
        return np.broadcast_to(np.int64(UNKNOWN), len(values))
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        small = (value if isinstance(value, int) and abs(value) < 2**63 else UNKNOWN for value in values)
        return np.fromiter(small, np.int64, len(values))


def lanes_of_events(
    process: NDArray[np.int64],
    thread: NDArray[np.int64],
    strings: dict[str, int],
    lane: Callable[[int | str, int | str], str],
) -> NDArray[np.int32]:
    """The place in ``strings``, which grows, of ``lane(pid, tid)`` for each event: int32, ``[events]``."""
    texts = list(strings)

    def written(code: int) -> int | str:
        return texts[TEXT_CODES - code] if code <= TEXT_CODES else code

    processes, process_number = np.unique(process, return_inverse=True)
    threads, thread_number = np.unique(thread, return_inverse=True)
    pairs, pair_number = np.unique(process_number * len(threads) + thread_number, return_inverse=True)
    places = []
    for pair in pairs.tolist():
        name = lane(*(written(int(code)) for code in (processes[pair // len(threads)], threads[pair % len(threads)])))
        places.append(strings.setdefault(name, len(strings)))
    return np.array(places, dtype=np.int32)[pair_number]
