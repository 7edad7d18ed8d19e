"""A report as one page that needs no network: health, findings, budgets, lanes, collectives, kernels."""

from pathlib import Path
from typing import Any

from headway.explain.drawn_lanes import COLOURS, drawn_lanes
from headway.explain.drawn_memory import drawn_memory
from headway.explain.health import repaired
from headway.explain.rank_view import RankView
from headway.explain.report import Report
from headway.explain.report_traces import traces_of
from headway.pages import filled
from headway.timeline import DEVICE_KINDS

SPANS = 24_000
"""Of a page, about."""
RANKS_DRAWN = 8
"""Ranks whose lanes are on the page: the first ones; budgets are of all."""
INSTANCES = 40
"""Collectives listed, those with the longest waits first."""


def write_page(report: Report, path: Path) -> None:
    """Write the page to ``path``. Raises OSError when the disk does not take it."""
    path.write_text(filled("headway.explain", "page.html", page_data(report)), encoding="utf-8")


def page_data(report: Report) -> dict[str, Any]:
    """What the page shows."""
    result = report.as_json()
    collectives = result.get("collectives")
    if collectives is not None:
        longest = sorted(collectives["instances"], key=lambda one: -one["largest_wait_us"])
        collectives = {**collectives, "instances": longest[:INSTANCES]}
    return {
        "inputs": result["inputs"],
        "health": result["health"],
        "findings": result["findings"],
        "ranks": result["ranks"],
        "kernels": result.get("kernels", []),
        "collectives": collectives,
        "planned": result.get("planned", []),
        "pipelines": result.get("pipelines", []),
        "colours": COLOURS,
        "lanes": _lanes(report),
    }


def _lanes(report: Report) -> list[dict[str, Any]]:
    """Lanes of each drawn rank, on the clock of the first."""
    views: list[tuple[RankView, int]] = []
    for trace, offset_ns in traces_of(report):
        sound = repaired(trace).trace
        if len(views) < RANKS_DRAWN and sound.timeline.kinds(*DEVICE_KINDS).any():
            views.append((RankView(sound), offset_ns))
    if not views:
        return []
    origin = min(view.window[0] - offset for view, offset in views)
    end = max(view.window[1] - offset for view, offset in views)
    return [
        {
            "rank": view.trace.rank,
            "length_ns": end - origin,
            "lanes": drawn_lanes(view, origin + offset, SPANS // len(views)),
            "memory": drawn_memory(view.trace.memory, origin + offset, end - origin),
        }
        for view, offset in views
    ]
