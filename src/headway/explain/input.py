"""What a given path is: its kind is told by its content, never by its name.

A reader of a kind is a module with ``explain_<kind>(inputs: Sequence[Input]) -> Explained`` that is named in
``READERS`` of :mod:`headway.explain.report`. It is called once with all inputs of its kind. What it can't read it tells
as a :class:`HealthMessage` when other inputs remain, and raises UserError for when nothing remains; it never lets any
other exception out, whatever the file holds.
"""

import re
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from headway.errors import UserError

HEAD_BYTES = 1 << 18
"""As much of a file as is looked at."""
LONGEST_PICKLE_SEARCH = 4 << 20


class InputKind(StrEnum):
    """What an input is."""

    KINETO = "kineto"
    """A trace of the PyTorch profiler, or any Chrome JSON, headway's own included."""
    NSYS = "nsys"
    """An sqlite export of Nsight Systems."""
    FLIGHT_RECORDER = "flight_recorder"
    """A dump of NCCL's flight recorder: pickle or JSON."""
    MEMORY_SNAPSHOT = "memory_snapshot"
    """A pickle of ``torch.cuda.memory._snapshot``."""
    PIPELINE_EVENTS = "pipeline_events"
    """A parquet table of a job's forward, backward and communication events by stage and data rank."""
    RUN_DIRECTORY = "run_directory"
    """A folder that ``headway train`` left behind."""
    LOG = "log"
    """What a trainer printed, or wrote as JSON lines."""
    TABLE = "table"
    """A table (tsv or csv) of runs that were tried."""


@dataclass(frozen=True)
class Input:
    """One recognised input."""

    path: Path
    kind: InputKind


def find_inputs(paths: Sequence[Path]) -> tuple[tuple[Input, ...], tuple[Path, ...]]:
    """The inputs at ``paths``, folders searched through, and the files of folders that are none.

    Raises UserError for a path that does not exist, a file that was named and is no input, and when there is no input.
    """
    found: dict[Path, Input] = {}
    passed_over = []
    for path in paths:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise UserError(f"{path} is no regular file: write what it gives to a file first")
        if not path.exists():
            raise UserError(f"{path} does not exist: name a trace, dump, snapshot, log, table, run or folder of them")
        for candidate in _candidates(path):
            kind = kind_of(candidate)
            if kind is not None:
                found.setdefault(candidate.resolve(), Input(candidate, kind))
            elif candidate == path:
                raise UserError(f"{path}: {_why_nothing(path)}; {_WANTED}")
            else:
                passed_over.append(candidate)
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: nothing to explain in there; {_WANTED}")
    return tuple(found.values()), tuple(passed_over)


def kind_of(path: Path) -> InputKind | None:
    """What ``path`` is; None for what is nothing to explain. Raises UserError when it can't be read."""
    if path.is_dir():
        return InputKind.RUN_DIRECTORY if _is_run_directory(path) else None
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if head.startswith(b"\x1f\x8b"):
                head = _unzipped(head)
            elif _is_pickle(head):
                head += file.read(LONGEST_PICKLE_SEARCH)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if head.startswith(b"SQLite format 3\x00"):
        return InputKind.NSYS if _is_nsys(path) else None
    if head.startswith(b"PAR1"):
        return InputKind.PIPELINE_EVENTS
    if _is_pickle(head):
        return _kind_of_pickle(head)
    return _kind_of_text(head)


_MEMBERS_OF_TRACES = ('"traceEvents"', '"distributedInfo"', '"deviceProperties"')
_COUNTS = re.compile(r"\b(global_?step|step|iteration|iter|epoch)s?\b[\"'\]:=/ ]{0,4}\d", re.I)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NO_HEADING = re.compile(r"[{}=|]|: ")
_MEASURES = re.compile(r"loss|time|tokens|tps|throughput|samples|lr\b|learning_rate|elapsed|memory|it/s|s/it", re.I)
_WANTED = (
    "wanted: a profiler trace (json, json.gz), an Nsight Systems sqlite export, flight-recorder dumps, "
    "a memory snapshot, a run directory, a log or a table"
)


def _why_nothing(path: Path) -> str:
    if path.is_file() and path.stat().st_size == 0:
        return "the file is empty"
    return "not recognised by its content"


def _candidates(path: Path, within: tuple[Path, ...] = ()) -> Iterator[Path]:
    """``path`` itself, or what lies in the folder; a run directory stands for itself and the traces in it.

    ``within``: the folders that lead here; a link back to one of them is not followed. Raises UserError for a folder
    that can't be read.
    """
    if not path.is_dir():
        yield path
    elif _is_run_directory(path):
        yield path
        if (traces := path / "traces").is_dir():
            yield from _candidates(traces)
    elif (real := path.resolve()) not in within:
        try:
            children = sorted(path.iterdir())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        for child in children:
            if not child.name.startswith(".") and (child.is_dir() or child.is_file()):
                yield from _candidates(child, (*within, real))


def _is_run_directory(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file() and (folder / "metrics.jsonl").is_file()


def _unzipped(head: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except zlib.error:
        return b""


def _is_pickle(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def _kind_of_pickle(head: bytes) -> InputKind | None:
    if b"device_traces" in head or b"segments" in head[:128]:
        return InputKind.MEMORY_SNAPSHOT
    return InputKind.FLIGHT_RECORDER if b"pg_config" in head or b"entries" in head else None


def _is_nsys(path: Path) -> bool:
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
            rows = database.execute("SELECT name FROM sqlite_master").fetchall()
    except (sqlite3.Error, UnicodeDecodeError):  # the second: of a message that quotes a damaged schema
        return False
    names = {str(name) for (name,) in rows}
    return bool(names & {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"})


def _kind_of_text(head: bytes) -> InputKind | None:
    if b"\x00" in head or not head.strip():
        return None
    text = _COLOURS.sub("", head.decode("utf-8", errors="replace")).lstrip("\ufeff \t\r\n")
    if text.startswith("{") and any(member in text for member in _MEMBERS_OF_TRACES):
        return InputKind.KINETO
    if text.startswith("[") and '"ph"' in text:
        return InputKind.KINETO
    # Of a long dump only the entries, which come first, stand in the head.
    if text.startswith("{") and ('"pg_config"' in text or ('"entries"' in text and '"collective_seq_id"' in text)):
        return InputKind.FLIGHT_RECORDER
    lines = [line for line in text.splitlines() if line.strip()]
    if _is_table(lines[:-1] if len(head) >= HEAD_BYTES else lines):
        return InputKind.TABLE
    return InputKind.LOG if _is_log(text, lines) else None


def _is_log(text: str, lines: Sequence[str]) -> bool:
    """Some line counts steps and tells something measured; or the whole is a history of such."""
    if text.startswith("{") and '"log_history"' in text:
        return True
    return any(_COUNTS.search(line) and _MEASURES.search(line) for line in lines)


def _is_table(lines: Sequence[str]) -> bool:
    """A heading and rows with as many tabs (or commas, as far as they stand in no quotes) as it has."""
    if len(lines) < 2 or lines[0].startswith(("{", "[")) or _NO_HEADING.search(lines[0]):
        return False
    for separator in ("\t", ","):
        columns = lines[0].count(separator)
        rows = lines[1:20]
        if columns >= 2 and sum(row.count(separator) >= columns for row in rows) * 2 > len(rows):
            return True
    return False
