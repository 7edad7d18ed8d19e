"""One Nsight Systems export: kernels, copies, runtime calls and NVTX ranges of each of its devices as a Timeline.

Tables and columns: https://docs.nvidia.com/nsight-systems/UserGuide/index.html#exporter-sqlite-schema. Which there are
depends on the version and on what was traced: what is missing is left out, except for the times of kernels. Kernels,
copies and runtime calls get the names that the PyTorch profiler gives them, so that the same findings apply.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import UserError
from headway.explain.rank_trace import RankTrace
from headway.timeline import UNKNOWN, Kind, Timeline, steps_of
from headway.timeline.collectives import collective_named, is_communication

_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
"""ENUM_CUDA_MEMCPY_OPER, as the PyTorch profiler spells it."""
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
"""ENUM_CUDA_MEM_KIND."""
_SYNCHRONISATIONS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
"""ENUM_CUPTI_SYNC_TYPE."""
_RANGES = (59, 60, 70, 71)
"""ENUM_NSYS_EVENT_TYPE: push/pop and start/end ranges of NVTX."""
_PROCESS = 1 << 24
"""A globalTid is a globalPid plus the thread's number below this."""
_STEP = re.compile(r"(?:train(?:ing)?[_ ]?)?(?:ProfilerStep|step|iter(?:ation)?)[_ #:=]*(\d{1,9})$", re.I)
_OPERATOR = re.compile(r"(aten|torch|c10d|autograd|prims|triton)::")
_SUFFIX = re.compile(r", (?:op_id|seq|sizes) = ")
"""What torch.autograd.profiler.emit_nvtx adds to the name of an operator."""

Column = NDArray[np.int64]


def read_nsys(path: Path) -> list[RankTrace]:
    """One trace for each device of each process in an export. The rank is the device's number.

    Raises UserError when it is no export, is damaged, or holds nothing that a device did.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            # A damaged text must not end the reading: it only becomes a name.
            database.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
            return _traces(_Export(path, database))
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second: of a message that quotes a damaged schema
        told = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: the sqlite file can't be read ({told}): export it again") from None


@dataclass(frozen=True)
class _Spans:
    """Spans of one table as columns, each of shape ``[spans]``."""

    kind: NDArray[np.int8]
    start: Column
    end: Column
    process: Column
    """globalPid."""
    device: Column
    """-1: the host's."""
    lane: NDArray[np.int32]
    """Places in the strings of the whole, as ``name``."""
    name: NDArray[np.int32]
    correlation: Column
    bytes: Column


def _traces(export: "_Export") -> list[RankTrace]:
    tables = [*_of_devices(export), *_of_hosts(export)]
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in _Spans.__dataclass_fields__}
    order = np.argsort(columns["start"], kind="stable")
    spans = _Spans(**{name: column[order] for name, column in columns.items()})
    works = spans.device != UNKNOWN
    if not works.any():
        raise UserError(
            f"{export.path}: no kernel, copy or fill of a device is in the export: profile with --trace=cuda,nvtx"
        )
    places = np.unique(np.stack([spans.process[works], spans.device[works]]), axis=1).T.tolist()
    facts = _facts(export)
    traces = []
    for process, device in places:
        own = (spans.process == process) & ((spans.device == device) | ~works)
        timeline = _timeline(spans, own, export.strings, device)
        traces.append(RankTrace(str(export.path), device, timeline, facts, export.malformed, rank_is_known=False))
    return traces


def _of_devices(export: "_Export") -> Iterator[_Spans]:
    where = ("globalPid", "deviceId", "streamId", "correlationId")

    def spans(kind: NDArray[np.int8], table: list[Column], name: NDArray[np.int32], size: Column | None) -> _Spans:
        start, end, process, device, stream, correlation, *_ = table
        lane = export.named(stream, lambda number: f"stream {number}")
        moved = _unknown(start) if size is None else size
        return _Spans(kind, start, end, process, device, lane, name, correlation, moved)

    kernels = export.spans("KERNEL", *where, "demangledName")
    name = export.named(kernels[-1], export.text)
    texts = list(export.strings)
    talks = [place for place in np.unique(name).tolist() if is_communication(texts[place])]
    yield spans(np.where(np.isin(name, talks), Kind.COMMUNICATION, Kind.COMPUTE).astype(np.int8), kernels, name, None)
    # With --cuda-graph-trace=graph a graph's kernels are one span.
    graphs = export.spans("GRAPH_TRACE", *where, "graphId")
    yield spans(_all(Kind.COMPUTE, graphs), graphs, export.named(graphs[-1], lambda graph: f"CUDA graph {graph}"), None)
    copies = export.spans("MEMCPY", *where, "bytes", "copyKind", "srcKind", "dstKind")
    kind, source, target = (np.clip(column, -1, 98) + 1 for column in copies[-3:])
    ways = (kind * 100 + source) * 100 + target
    yield spans(_all(Kind.MEMORY, copies), copies, export.named(ways, _copy_named), copies[-4])
    fills = export.spans("MEMSET", *where, "bytes")
    yield spans(_all(Kind.MEMORY, fills), fills, export.named(fills[-1] * 0, lambda _: "Memset (Device)"), fills[-1])


def _of_hosts(export: "_Export") -> Iterator[_Spans]:
    """What the hosts did, and how long they or streams waited by the device's account."""

    def spans(kind: NDArray[np.int8], table: list[Column], name: NDArray[np.int32], correlation: Column) -> _Spans:
        start, end, thread, *_ = table
        lane = export.named(thread % _PROCESS, lambda number: f"thread {number}")
        none = _unknown(start)
        return _Spans(kind, start, end, thread - thread % _PROCESS, none, lane, name, correlation, none)

    calls = export.spans("RUNTIME", "globalTid", "correlationId", "nameId")
    # cudaLaunchKernel_v7000, cudaMemcpyAsync_ptsz: the version and the default stream's kind.
    name = export.named(calls[-1], lambda place: re.sub(r"(_ptsz|_ptds|_v\d+)+$", "", export.text(place)))
    yield spans(_all(Kind.RUNTIME, calls), calls, name, calls[-2])
    costs = export.spans("OVERHEAD", "globalTid", "nameId")
    yield spans(_all(Kind.OVERHEAD, costs), costs, export.named(costs[-1], export.text), _unknown(costs[0]))
    ranges, names = export.ranges()
    texts = list(export.strings)
    operator = [place for place in np.unique(names).tolist() if _OPERATOR.match(texts[place])]
    kind = np.where(np.isin(names, operator), Kind.OPERATOR, Kind.ANNOTATION).astype(np.int8)
    yield spans(kind, ranges, names, _unknown(ranges[0]))
    # The device in this table is that of the process's first context, not the one that was waited for.
    start, end, process, correlation, what = export.spans("SYNCHRONIZATION", "globalPid", "correlationId", "syncType")
    name = export.named(what, lambda way: _SYNCHRONISATIONS.get(way, "Synchronization"))
    lane = export.named(what * 0, lambda _: "synchronisation")
    none = _unknown(start)
    kinds = np.full(len(start), Kind.SYNCHRONISATION, dtype=np.int8)
    yield _Spans(kinds, start, end, process, none, lane, name, correlation, none)


class _Export:
    """One open export: its tables as columns, and all strings that were met."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self.strings: dict[str, int] = {"": 0}
        self.malformed = 0
        """Rows without readable times: left out."""
        self._database = database
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._tables = {str(name) for (name,) in names}
        self._texts = {place: str(text) for place, text in self.select("StringIds", "id", "value")}

    def text(self, place: int) -> str:
        """The export's own string of that number; empty when there is none."""
        return self._texts.get(place, "")

    def named(self, values: Column, name_of: Callable[[int], str]) -> NDArray[np.int32]:
        """Places in ``strings`` of the names of ``values``."""
        distinct, inverse = np.unique(values, return_inverse=True)
        places = [self.strings.setdefault(name_of(value), len(self.strings)) for value in distinct.tolist()]
        return np.array(places, dtype=np.int32)[inverse] if len(places) else np.zeros(0, dtype=np.int32)

    def spans(self, activity: str, *wanted: str) -> list[Column]:
        """Start, end and ``wanted`` columns (-1 where they are missing or no number) of a table of activities."""
        table = f"CUPTI_ACTIVITY_KIND_{activity}"
        columns = self.columns(table)
        if columns and (missing := {"start", "end"} - columns):
            raise UserError(f"{self.path}: {table} has no column {', '.join(sorted(missing))}: export it again")
        return self._integers(table, columns, ("start", "end", *wanted)) if columns else _empty(2 + len(wanted))

    def ranges(self) -> tuple[list[Column], NDArray[np.int32]]:
        """Start, end and thread of NVTX ranges that have an end, and places in ``strings`` of their names."""
        table, columns = "NVTX_EVENTS", self.columns("NVTX_EVENTS")
        if not {"start", "end", "eventType"} <= columns:
            return _empty(3), np.zeros(0, dtype=np.int32)
        which = f'eventType IN ({", ".join(map(str, _RANGES))}) AND "end" IS NOT NULL'
        spans = self._integers(table, columns, ("start", "end", "globalTid"), which)
        given = ["text" if "text" in columns else "NULL", "textId" if "textId" in columns else "NULL"]
        names = []
        query = f"SELECT {', '.join(given)} FROM {table} WHERE {_WHOLE} AND {which} ORDER BY rowid"
        for own, place in self._database.execute(query):
            said = own if isinstance(own, str) else self.text(place)
            suffix = _SUFFIX.search(said)
            names.append(self.strings.setdefault(said[: suffix.start()] if suffix else said, len(self.strings)))
        return spans, np.array(names, dtype=np.int32)

    def select(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """All rows of a table; none when it, or one of the columns, does not exist."""
        if not set(columns) <= self.columns(table):
            return []
        return self._database.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()

    def columns(self, table: str) -> set[str]:
        """The columns of a table; none when it does not exist."""
        if table not in self._tables:
            return set()
        return {str(row[1]) for row in self._database.execute(f"PRAGMA table_info({table})")}

    def _integers(self, table: str, known: set[str], wanted: tuple[str, ...], which: str = "TRUE") -> list[Column]:
        chosen = [
            f'CASE typeof("{name}") WHEN \'integer\' THEN "{name}" ELSE {UNKNOWN} END' if name in known else "-1"
            for name in wanted
        ]
        query = f"SELECT {', '.join(chosen)} FROM {table} WHERE {_WHOLE} AND {which} ORDER BY rowid"
        rows = self._database.execute(query).fetchall()
        unread = f"SELECT count(*) FROM {table} WHERE NOT ({_WHOLE}) AND {which}"
        self.malformed += int(self._database.execute(unread).fetchone()[0])
        return list(np.array(rows, dtype=np.int64).T) if rows else _empty(len(wanted))


_LONGEST_NS = 2**61
_WHOLE = (
    "typeof(start) = 'integer' AND typeof(\"end\") = 'integer' AND \"end\" >= start "
    f'AND start BETWEEN -{_LONGEST_NS} AND {_LONGEST_NS} AND "end" <= {_LONGEST_NS}'
)
"""Rows whose times can be read."""


def _timeline(spans: _Spans, own: NDArray[np.bool_], strings: Mapping[str, int], device: int) -> Timeline:
    listed, texts = list(strings), dict(strings)
    collective = np.zeros(int(own.sum()), dtype=np.int32)
    name, kind = spans.name[own], spans.kind[own]
    for place in np.unique(name[kind == Kind.COMMUNICATION]).tolist():
        spelled = collective_named(listed[place])
        collective[name == place] = texts.setdefault(spelled, len(texts))
    timeline = Timeline.of_columns(
        {
            "kind": kind,
            "start_ns": spans.start[own],
            "duration_ns": (spans.end - spans.start)[own],
            "lane": spans.lane[own],
            "name": name,
            "collective": collective,
            "correlation": spans.correlation[own],
            "bytes": spans.bytes[own],
            "rank": device,
        },
        texts,
        length=len(name),
    )
    return replace(timeline, step=steps_of(_with_profilers_steps(timeline)))


def _with_profilers_steps(timeline: Timeline) -> Timeline:
    """Ranges that name a step (``iteration 12``) under the PyTorch profiler's name for one."""
    places = np.unique(timeline.name[timeline.kinds(Kind.ANNOTATION)]).tolist()
    renamed = {place: f"ProfilerStep#{found[1]}" for place in places if (found := _STEP.match(timeline.strings[place]))}
    return replace(timeline, strings=tuple(renamed.get(place, text) for place, text in enumerate(timeline.strings)))


def _copy_named(way: int) -> str:
    """Of kind, source and target, each counted from 1 with 0 for what is not known, two digits each."""
    kind, source, target = way // 10_000 - 1, way // 100 % 100 - 1, way % 100 - 1
    ends = f"{_MEMORY.get(source, 'Unknown')} -> {_MEMORY.get(target, 'Unknown')}"
    return f"Memcpy {_COPIES.get(kind, 'Unknown')} ({ends})"


def _facts(export: _Export) -> Mapping[str, Any]:
    """What the PyTorch profiler calls ``deviceProperties``, as far as the export tells it."""
    spelled = {"id": "id", "name": "name", "totalMemory": "totalGlobalMem", "smCount": "numSms"}
    chosen = [column for column in spelled if column in export.columns("TARGET_INFO_GPU")]
    if not {"id", "name"} <= set(chosen):
        return {}
    rows = export.select("TARGET_INFO_GPU", *chosen)
    return {"deviceProperties": [{spelled[k]: value for k, value in zip(chosen, row, strict=True)} for row in rows]}


def _all(kind: Kind, table: list[Column]) -> NDArray[np.int8]:
    return np.full(len(table[0]), kind, dtype=np.int8)


def _unknown(like: Column) -> Column:
    return np.full(len(like), UNKNOWN, dtype=np.int64)


def _empty(columns: int) -> list[Column]:
    return [np.zeros(0, dtype=np.int64) for _ in range(columns)]
