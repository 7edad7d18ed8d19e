"""A search as one page that needs no network: time against memory of every candidate, its frontier, and the plans."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.pages import filled
from headway.plan.explanation import explanation
from headway.plan.search import Analysed, Planned, json_of
from headway.rehearse.memory import GIB

POINTS = 6_000
"""Candidates on the page: the fastest, the frontier, and of the others an even choice; the page says how many."""


def write_plan_page(planned: Planned, title: str, path: Path) -> None:
    """Write the page to ``path``."""
    path.write_text(filled("headway.plan", "plan.html", plan_page_data(planned, title)), encoding="utf-8")


def plan_page_data(planned: Planned, title: str) -> dict[str, Any]:
    """What the page shows."""
    found = planned.analysed
    result = json_of(planned)
    shown = _shown(found)
    time, memory = np.asarray(found.analysis.step_ns.value) / 1e9, np.asarray(found.analysis.memory.value) / GIB
    plans = [
        row | {"name": one.choice.name, "place": one.place, "shares": one.prediction.shares.named()}
        for row, one in zip(result["plans"], planned.plans, strict=True)
    ]
    return {
        "title": title,
        "cluster": planned.cluster.name,
        "memory_gb": planned.cluster.accelerator.memory_gb,
        "evaluated": len(found.candidates),
        "seconds": planned.seconds,
        "price": planned.price,
        "explanation": explanation(planned),
        "plans": plans,
        "rejected": result["rejected"],
        "points": {
            "time": [float(f"{seconds:.5g}") for seconds in time[shown].tolist()],
            "memory": [float(f"{gib:.5g}") for gib in memory[shown].tolist()],
            "oom": [round(chance, 3) for chance in found.oom[shown].tolist()],
            "place": shown.tolist(),
            "name": [found.candidates.choice(place).name for place in shown.tolist()],
            "devices": found.candidates["devices"][shown].tolist(),
        },
        "frontier": frontier(found).tolist(),
    }


def frontier(found: Analysed) -> NDArray[np.int64]:
    """Places of the candidates that no other beats in both time and memory, fastest first."""
    time, memory = np.asarray(found.analysis.step_ns.value), np.asarray(found.analysis.memory.value)
    order = np.lexsort((memory, time))
    least = np.minimum.accumulate(memory[order])
    best = np.append(True, least[1:] < least[:-1]) if len(order) else np.zeros(0, dtype=bool)
    return order[best]


def _shown(found: Analysed) -> NDArray[np.int64]:
    count = len(found.candidates)
    if count <= POINTS:
        return np.arange(count)
    fastest = found.ranked()[: POINTS // 3]
    even = np.linspace(0, count - 1, POINTS // 2).astype(np.int64)
    return np.unique(np.concatenate([fastest, even, frontier(found)]))
