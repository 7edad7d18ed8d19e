"""A prediction as one page that needs no network: lanes, memory, shares and tables."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.pages import filled
from headway.rehearse.columns import Flags, Integers
from headway.rehearse.memory import GIB, Memory
from headway.rehearse.predicted_timeline import HOST_LANE, LAUNCH
from headway.rehearse.prediction import Prediction
from headway.rehearse.simulate import RankTimes
from headway.timeline import Kind, Timeline

SPANS = 20_000
"""Of a page, about: neighbours that are shorter than can be seen are drawn as one."""
POINTS = 1_200
"""Of a memory curve."""
ROWS = 15
"""Of each table."""
COLOURS = ("forward", "backward", "recompute", "optimizer", "other", "communication", "copy", "launch", "wait")
"""What a span is drawn as; the page has a colour for each."""


def write_page(prediction: Prediction, title: str, path: Path) -> None:
    """Write the page to ``path``."""
    path.write_text(filled("headway.rehearse", "page.html", page_data(prediction, title)), encoding="utf-8")


def page_data(prediction: Prediction, title: str) -> dict[str, Any]:
    """What the page shows."""
    result = prediction.result_json()
    simulation = prediction.simulation
    share = SPANS // len(simulation.ranks)
    return {
        "title": title,
        "cluster": prediction.cluster.name,
        "prediction": result["prediction"],
        "memory": result["memory"],
        "shares": prediction.shares.named(),
        "errors": sorted(result["errors_s"].items(), key=lambda error: -max(error[1])),
        "step_ns": simulation.step_ns,
        "colours": COLOURS,
        "ranks": [
            {
                "rank": times.program.facts.rank,
                "stages": times.program.facts.stages,
                "lanes": _lanes(prediction.timeline.of_rank(times.program.facts.rank), simulation.step_ns, share),
                "memory": _curve(memory, times, simulation.step_ns),
            }
            for times, memory in zip(simulation.ranks, prediction.memories, strict=True)
        ],
        "peak_of": [
            {
                "categories": [(holding.name, holding.bytes, holding.count) for holding in memory.categories],
                "modules": [(holding.name, holding.bytes, holding.count) for holding in memory.modules],
            }
            for memory in prediction.memories
        ],
        "operators": result["operators"][:ROWS],
        "collectives": result["collectives"][:ROWS],
    }


def _lanes(timeline: Timeline, step_ns: int, most: int) -> list[dict[str, Any]]:
    """Each lane's spans as columns, the compute lane first and the host last."""
    order = np.lexsort((timeline.start_ns, timeline.lane))
    spans, colour = timeline.select(order), _colours(timeline)[order]
    opens, shortest = np.ones(len(spans), dtype=bool), step_ns / 20_000
    while opens.sum() > most:
        opens, shortest = _opens(spans, colour, shortest), 2 * shortest
    begins = np.flatnonzero(opens)
    counts = np.diff(np.append(begins, len(spans)))
    ends = np.maximum.reduceat(spans.end_ns, begins) if len(begins) else spans.end_ns
    names, modules = spans.text("name"), spans.text("module")
    lanes: dict[str, dict[str, Any]] = {}
    lane_names = spans.text("lane")
    for begin, end, count in zip(begins.tolist(), ends.tolist(), counts.tolist(), strict=True):
        lane = lanes.setdefault(
            lane_names[begin],
            {"name": lane_names[begin], "start": [], "end": [], "colour": [], "text": [], "count": [], "texts": {}},
        )
        where = f" · {modules[begin]}" if modules[begin] else ""
        told = names[begin] + where if count == 1 else f"{count} operators from {names[begin]}{where}"
        lane["start"].append(int(spans.start_ns[begin]))
        lane["end"].append(end)
        lane["colour"].append(int(colour[begin]))
        lane["text"].append(lane["texts"].setdefault(told, len(lane["texts"])))
        lane["count"].append(count)
    for lane in lanes.values():
        lane["texts"] = list(lane["texts"])
    return sorted(lanes.values(), key=lambda lane: (lane["name"] != "compute", lane["name"] == HOST_LANE, lane["name"]))


def _opens(spans: Timeline, colour: NDArray[np.int8], shortest: float) -> Flags:
    """Which spans are drawn apart from the one before: of another lane or colour, or either long, or a gap between."""
    opens = np.ones(len(spans), dtype=bool)
    short = spans.duration_ns < shortest
    near = spans.start_ns[1:] - spans.end_ns[:-1] < shortest / 4
    same = (spans.lane[1:] == spans.lane[:-1]) & (colour[1:] == colour[:-1])
    opens[1:] = ~(short[1:] & short[:-1] & near & same)
    return opens


def _colours(timeline: Timeline) -> NDArray[np.int8]:
    colour = np.full(len(timeline), COLOURS.index("other"), dtype=np.int8)
    for phase in ("forward", "backward", "recompute", "optimizer"):
        colour[timeline.matching("phase", [phase])] = COLOURS.index(phase)
    colour[timeline.kinds(Kind.COMMUNICATION)] = COLOURS.index("communication")
    colour[timeline.kinds(Kind.MEMORY)] = COLOURS.index("copy")
    host = timeline.kinds(Kind.RUNTIME)
    colour[host] = COLOURS.index("wait")
    colour[host & timeline.matching("name", [LAUNCH])] = COLOURS.index("launch")
    return colour


def _curve(memory: Memory, times: RankTimes, step_ns: int) -> dict[str, Any]:
    """Bytes of each category over the time of the step; of many changes near each other the highest is kept."""
    begun = np.append(np.maximum.accumulate(times.start_ns), step_ns) if len(times.start_ns) else np.array([step_ns])
    at = begun[np.minimum(memory.operator, len(begun) - 1)]
    kept = _highest(memory.held, np.minimum(at * POINTS // max(step_ns, 1), POINTS - 1))
    names = sorted(memory.held_by, key=lambda name: -int(memory.held_by[name].max(initial=0)))
    usable = None if memory.usable is None else memory.usable.value
    peak = int(np.argmax(memory.held)) if len(memory.held) else -1
    return {
        "at": at[kept].tolist(),
        "names": [name for name in names if memory.held_by[name].any()],
        "held": [
            [float(f"{gib:.4g}") for gib in (memory.held_by[name][kept] / GIB).tolist()]
            for name in names
            if memory.held_by[name].any()
        ],
        "peak_at": int(at[peak]) if peak >= 0 else 0,
        "peak": memory.peak_bytes / GIB,
        "usable": None if usable is None else usable / GIB,
    }


def _highest(held: Integers, bucket: Integers) -> Integers:
    """The place of the highest value of each bucket, ascending."""
    order = np.lexsort((held, bucket))
    last = np.append(bucket[order][1:] != bucket[order][:-1], True) if len(order) else np.zeros(0, dtype=bool)
    return np.sort(order[last])
