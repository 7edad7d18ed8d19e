"""A rank's Timeline as lanes that a page can draw: streams, and what kept the device idle; short neighbours as one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.explain.idle import CAUSES
from headway.explain.rank_view import RankView
from headway.timeline import Kind

SHORTEST = 20_000
"""Spans shorter than this part of the window may be drawn as one with neighbours; twice as long, until all fit."""
IDLE_LANE = "idle by"
COLOURS = ("compute", "communication", "copy", *CAUSES)
"""What a span is drawn as; the page has a colour for each."""
_CODE = {Kind.COMPUTE: 0, Kind.COMMUNICATION: 1, Kind.MEMORY: 2}

Integers = NDArray[np.int64]


def drawn_lanes(view: RankView, origin_ns: int, most: int) -> list[dict[str, Any]]:
    """Lanes of about ``most`` spans in all, instants in ns from ``origin_ns``.

    Each is ``{name, start, end, colour, text, count, texts}``: columns of one length, ``text`` being places in
    ``texts``.
    """
    timeline = view.timeline
    lanes = timeline.lane[view.device]
    found = [_idle(view, origin_ns, most // 4)]
    for lane in np.unique(lanes).tolist():
        spans = view.device[lanes == lane]
        code = np.array([_CODE[Kind(kind)] for kind in timeline.kind[spans].tolist()], dtype=np.int64)
        names = [timeline.strings[name] for name in timeline.name[spans].tolist()]
        share = max(most * len(spans) // len(view.device), 50)
        starts, ends = timeline.start_ns[spans] - origin_ns, timeline.end_ns[spans] - origin_ns
        found.append(_lane(timeline.strings[lane], starts, ends, code, names, share, view))
    return found


def _idle(view: RankView, origin_ns: int, most: int) -> dict[str, Any]:
    starts, ends, code = [], [], []
    for place, cause in enumerate(CAUSES):
        during = view.idle.by_cause[cause]
        starts.append(during.starts)
        ends.append(during.ends)
        code.append(np.full(len(during), len(_CODE) + place))
    begin = np.concatenate(starts)
    order = np.argsort(begin, kind="stable")
    codes = np.concatenate(code)[order]
    names = [COLOURS[one].replace("_", " ") for one in codes.tolist()]
    return _lane(IDLE_LANE, begin[order] - origin_ns, np.concatenate(ends)[order] - origin_ns, codes, names, most, view)


def _lane(
    name: str, starts: Integers, ends: Integers, code: Integers, names: list[str], most: int, view: RankView
) -> dict[str, Any]:
    opens = np.ones(len(starts), dtype=bool)
    shortest = max((view.window[1] - view.window[0]) / SHORTEST, 1.0)
    while opens.sum() > max(most, 1):
        opens = _opens(starts, ends, code, shortest)
        if shortest > view.window[1] - view.window[0]:
            break
        shortest *= 2
    begins = np.flatnonzero(opens)
    counts = np.diff(np.append(begins, len(starts)))
    last = np.maximum.reduceat(ends, begins) if len(begins) else ends
    texts: dict[str, int] = {}
    told = []
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        text = names[begin][:120] if count == 1 else f"{count} from {names[begin][:100]}"
        told.append(texts.setdefault(text, len(texts)))
    return {
        "name": name,
        "start": starts[begins].tolist(),
        "end": last.tolist(),
        "colour": code[begins].tolist(),
        "text": told,
        "count": counts.tolist(),
        "texts": list(texts),
    }


def _opens(starts: Integers, ends: Integers, code: Integers, shortest: float) -> NDArray[np.bool_]:
    """Which spans are drawn apart from the one before: of another colour, or either long, or a gap between."""
    opens = np.ones(len(starts), dtype=bool)
    short = ends - starts < shortest
    near = starts[1:] - ends[:-1] < shortest / 4
    opens[1:] = ~(short[1:] & short[:-1] & near & (code[1:] == code[:-1]))
    return opens
