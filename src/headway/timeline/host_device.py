"""The trace of a run on CPUs, where the host computes what it calls: its operators as the work of a device.

What reads Timelines knows a host that launches and a device that runs. So each operator that computes becomes a call
that waits and a span of the device of the same time, and gloo's work becomes communication, launched where the host
handed it over. A host that stands still until such work ends is waiting for it, though no event of the trace says so.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.timeline.collectives import collective_named
from headway.timeline.intervals import Intervals, Mask
from headway.timeline.kinds import Kind
from headway.timeline.scopes import DATA_RANGE
from headway.timeline.timeline import Timeline, concatenate

RUNS, HANDS_OVER, WAITS = "host runs an operator", "host hands over a collective", "host waits for a collective"
"""Names of the calls that are added. The first and the last wait for what they stand for."""
RESUMES_NS = 1_000_000
"""A host that goes on within so long after the end of a collective was waiting for it."""

_COMPUTES = re.compile(r"(?!autograd::|torch::|c10d|_c10d|profiler::)\w+::")
_COMPILED = re.compile(r"## Call CompiledFxGraph ")
_COLLECTIVE = re.compile(r"_?c10d(_functional)?::")
_WAIT = re.compile(r"_c10d_functional::wait_tensor|c10d::barrier")
_GLOO, _ON_OWN_THREAD = re.compile(r"gloo:"), re.compile(r"gloo:(?!send|recv)")

Integers = NDArray[np.int64]


def with_host_as_device(timeline: Timeline, axes: dict[str, str]) -> Timeline:
    """``timeline``, of one rank, with what its host computes and sends as spans of a device.

    ``axes``: mesh axes of process groups by their names. Gloo does not say in which group it works; where all groups
    are of one axis it is known nevertheless, and otherwise collectives are not laid beside those of other ranks.
    """
    notes = timeline.kinds(Kind.ANNOTATION)
    sent = np.flatnonzero(notes & _named(timeline, _GLOO))
    beside = np.isin(timeline.lane, np.unique(timeline.lane[notes & _named(timeline, _ON_OWN_THREAD)]))
    host = timeline.kinds(Kind.OPERATOR) & ~beside
    computing = (host & _named(timeline, _COMPUTES)) | (notes & ~beside & _named(timeline, _COMPILED))
    computes = _outermost(timeline, np.flatnonzero(computing & ~_while_loading(timeline)))
    handed = _outermost(timeline, np.flatnonzero(host & _named(timeline, _COLLECTIVE)))
    waits = np.flatnonzero(host & _named(timeline, _WAIT))
    handed = handed[~np.isin(handed, waits)]
    call = _handed_over_by(timeline, sent, handed)
    sent, call = sent[call >= 0], call[call >= 0]
    first = int(timeline.correlation.max(initial=-1)) + 1
    numbers = np.arange(first, first + len(computes))
    links = np.arange(first + len(computes), first + len(computes) + len(sent))
    (axis,) = set(axes.values()) if len(set(axes.values())) == 1 else ("",)
    group = axis or f"gloo of rank {timeline.ranks()}"
    rest = np.ones(len(timeline), dtype=bool)
    rest[sent] = False
    calls = timeline.intervals(np.concatenate([computes, handed, waits]))
    return concatenate(
        [
            timeline.select(rest),
            _copied(timeline, computes, Kind.COMPUTE, correlation=numbers, **_products_within(timeline, computes)),
            _copied(timeline, computes, Kind.RUNTIME, name=RUNS, correlation=numbers),
            _collectives(timeline, sent, call, axis, group, links),
            _copied(timeline, call, Kind.RUNTIME, name=HANDS_OVER, correlation=links),
            _copied(timeline, waits, Kind.RUNTIME, name=WAITS),
            _silent_waits(timeline, sent, call, calls),
        ]
    )


def _named(timeline: Timeline, pattern: re.Pattern[str]) -> Mask:
    mask: Mask = np.array([bool(pattern.match(text)) for text in timeline.strings], dtype=bool)[timeline.name]
    return mask


def _while_loading(timeline: Timeline) -> Mask:
    loads = timeline.intervals(timeline.kinds(Kind.ANNOTATION) & timeline.matching("name", [DATA_RANGE]))
    mask: Mask = loads.contains(timeline.start_ns)
    return mask


def _outermost(timeline: Timeline, spans: Integers) -> Integers:
    """Those of ``spans`` that no other of them on their thread encloses, by start."""
    found = []
    for lane in np.unique(timeline.lane[spans]).tolist():
        own = spans[timeline.lane[spans] == lane]
        own = own[np.lexsort((-timeline.duration_ns[own], timeline.start_ns[own]))]
        ends = timeline.end_ns[own]
        reached = np.concatenate([[-(2**63)], np.maximum.accumulate(ends)])[: len(own)]
        found.append(own[timeline.start_ns[own] >= reached])
    kept = np.concatenate(found) if found else spans
    return kept[np.argsort(timeline.start_ns[kept], kind="stable")]


def _handed_over_by(timeline: Timeline, sent: Integers, handed: Integers) -> Integers:
    """The call that handed over each work of gloo, -1 where none is left: each took the first that no other had.

    A group works in order, and begins soon after; works of two groups whose calls come together may change places.
    """
    taken, call = 0, np.full(len(sent), -1, dtype=np.int64)
    for at in np.argsort(timeline.start_ns[sent], kind="stable").tolist():
        if taken < len(handed) and timeline.start_ns[handed[taken]] <= timeline.start_ns[sent[at]]:
            call[at] = handed[taken]
            taken += 1
    return call


def _copied(timeline: Timeline, spans: Integers, kind: Kind, name: str | None = None, **columns: Any) -> Timeline:
    """The spans once more as another kind, called ``name``; what links operators to others is left out."""
    chosen = timeline.select(spans)
    columns = {"operator": -1, "correlation": -1} | columns
    strings = dict.fromkeys((*chosen.strings, *([name] if name else [])))
    texts = {text: place for place, text in enumerate(strings)}
    kept = ("start_ns", "duration_ns", "lane", "name", "module", "phase", "rank", "step", "group")
    columns = {key: getattr(chosen, key) for key in kept} | columns | {"kind": int(kind)}
    if name is not None:
        columns["name"] = texts[name]
    return Timeline.of_columns(columns, strings, length=len(chosen))


def _products_within(timeline: Timeline, computes: Integers) -> dict[str, Any]:
    """FLOPs, bytes and dtype of the products within each of ``computes``, which are disjoint and in order."""
    flops, moved = (np.full(len(computes), -1, dtype=np.int64) for _ in range(2))
    dtype = np.zeros(len(computes), dtype=np.int32)
    products = np.flatnonzero(timeline.kinds(Kind.OPERATOR) & (timeline.flops > 0))
    at = np.searchsorted(timeline.start_ns[computes], timeline.start_ns[products], side="right") - 1
    inside = (at >= 0) & (timeline.end_ns[products] <= timeline.end_ns[computes][at])
    at, products = at[inside], products[inside]
    flops[at], moved[at] = 0, 0
    np.add.at(flops, at, timeline.flops[products])
    np.add.at(moved, at, timeline.bytes[products])
    dtype[at] = timeline.dtype[products]
    return {"flops": flops, "bytes": moved, "dtype": dtype}


def _collectives(
    timeline: Timeline, sent: Integers, call: Integers, axis: str, group: str, links: Integers
) -> Timeline:
    """Gloo's work as communication of the module and step that handed it over, in which gloo may call it another."""
    chosen = timeline.select(call)
    names = timeline.select(sent).text("name")
    asked = [collective_named(text.rpartition("::")[2]) for text in chosen.text("name")]
    return Timeline.of(
        kind=[Kind.COMMUNICATION] * len(sent),
        start_ns=timeline.start_ns[sent],
        duration_ns=timeline.duration_ns[sent],
        lane=[f"gloo, {lane}" for lane in timeline.select(sent).text("lane")],
        name=names,
        collective=[one or collective_named(name) for one, name in zip(asked, names, strict=True)],
        axis=axis,
        group=group,
        module=chosen.text("module"),
        phase=chosen.text("phase"),
        rank=chosen.rank,
        step=chosen.step,
        correlation=links,
    )


def _silent_waits(timeline: Timeline, sent: Integers, call: Integers, calls: Intervals) -> Timeline:
    """Calls in which the host waits, where it does nothing until a collective that it handed over has ended."""
    if not len(sent) or not len(calls):
        return timeline.select(np.zeros(0, dtype=np.int64))
    ends = timeline.end_ns[sent]
    gaps = calls.gaps_in(int(calls.starts[0]), int(calls.ends[-1]))
    at = np.searchsorted(gaps.starts, ends, side="right") - 1
    within = (at >= 0) & (ends <= gaps.ends[at]) & (gaps.ends[at] - ends <= RESUMES_NS)
    last = np.full(len(gaps), -1, dtype=np.int64)
    np.maximum.at(last, at[within], ends[within])
    waited = np.flatnonzero(last > gaps.starts)
    lane = timeline.strings[timeline.lane[call[0]]]
    return Timeline.of(
        kind=[Kind.RUNTIME] * len(waited),
        start_ns=gaps.starts[waited],
        duration_ns=last[waited] - gaps.starts[waited],
        lane=[lane] * len(waited),
        name=[WAITS] * len(waited),
        rank=np.full(len(waited), timeline.rank[0]),
    )
