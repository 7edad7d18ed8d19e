"""Reading Chrome JSON into a Timeline: traces of the PyTorch profiler, and headway's own."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.timeline import kineto
from headway.timeline.kinds import Kind
from headway.timeline.memory import Memory, memory_of
from headway.timeline.timeline import INTEGER_COLUMNS, Timeline
from headway.timeline.trace_events import Arguments, EventColumns, lanes_of_events, read_events

OWN_FACT = "headwayTimeline"
"""The member of a trace file that says it was written by :func:`headway.timeline.write_chrome_trace`."""
OWN_ARGUMENTS = Arguments(
    strings=("module", "phase", "axis", "collective", "group", "dtype"),
    integers=tuple(name for name in INTEGER_COLUMNS if name != "rank"),
)


@dataclass(frozen=True)
class Trace:
    """What a trace file holds."""

    timeline: Timeline
    facts: dict[str, Any]
    """What the file says beside its events: ``distributedInfo``, ``deviceProperties``, …"""
    left_out: Counter[str]
    """Events that are not spans, by their ``ph``; ``malformed``: without readable name, times or duration."""
    truncated: bool
    """The file ends in the middle: what came before is here."""
    mended: bool
    """Some of the text was no valid JSON, as some profilers write it, and was read nonetheless."""
    memory: Memory = field(default_factory=Memory.nothing)
    """What was allocated when, where the profiler watched."""


def read_chrome_trace(path: Path) -> Trace:
    """Read a trace file (.json or gzip). The rank is the one that the file names, -1 when it names none.

    Raises UserError.
    """
    events = read_events(path, lambda facts: OWN_ARGUMENTS if OWN_FACT in facts else kineto.ARGUMENTS)
    timeline = _own_timeline(events) if OWN_FACT in events.facts else kineto.kineto_timeline(events)
    memory = memory_of(events)
    return Trace(timeline, events.facts, events.left_out, events.truncated, events.mended, memory)


def _own_timeline(events: EventColumns) -> Timeline:
    columns, strings = events.columns, events.strings
    kind_of = np.full(len(strings), Kind.OTHER, dtype=np.int8)
    for kind in Kind:
        if kind.name.lower() in strings:
            kind_of[strings[kind.name.lower()]] = kind
    lane = lanes_of_events(
        columns["pid"],
        columns["tid"],
        strings,
        lambda process, thread: events.names.get(("thread_name", process, thread), str(thread)),
    )
    return Timeline.of_columns(
        {
            "kind": kind_of[columns["cat"]],
            "start_ns": columns["ts"],
            "duration_ns": columns["dur"],
            "rank": columns["pid"],
            "lane": lane,
            "name": columns["name"],
            **{name: columns[name] for name in (*OWN_ARGUMENTS.strings, *OWN_ARGUMENTS.integers)},
        },
        strings,
        length=len(columns["ts"]),
    )
