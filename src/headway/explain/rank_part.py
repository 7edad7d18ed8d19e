"""What one rank says, worked out in its own process: budget, health, findings, and what comparing ranks needs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.explain.budget import budget_json
from headway.explain.collectives import RankCollectives, collectives_of
from headway.explain.finding import Finding, HealthMessage, Severity
from headway.explain.health import device_health, file_health, repaired, world_size
from headway.explain.kernels import Products, device_name, kernel_times, product_times
from headway.explain.pathologies.compute import find_compute
from headway.explain.pathologies.data import find_data
from headway.explain.pathologies.launch import find_launch
from headway.explain.pathologies.memory import find_memory
from headway.explain.pathologies.optimizer import find_optimizer
from headway.explain.pathologies.products import find_products
from headway.explain.pathologies.profiler import find_profiler
from headway.explain.pathologies.synchronisation import find_synchronisation
from headway.explain.placement import Placement, placements
from headway.explain.rank_trace import RankTrace
from headway.explain.rank_view import RankView
from headway.explain.replay import Graph
from headway.timeline import DEVICE_KINDS

PATHOLOGIES: tuple[Callable[[RankView], Iterator[Finding]], ...] = (
    find_data,
    find_synchronisation,
    find_launch,
    find_compute,
    find_products,
    find_optimizer,
    find_memory,
    find_profiler,
)
UNCLASSIFIED = 0.01
"""Share of busy time in kernels of unknown names from which the budget has a caveat."""


@dataclass(frozen=True, eq=False)
class RankPart:
    """One rank after analysis, without its Timeline: small enough to be handed between processes."""

    file: str
    rank: int
    world_size: int
    health: tuple[HealthMessage, ...]
    budget: Mapping[str, Any] | None = None
    """None when there is no device time to budget."""
    findings: tuple[Finding, ...] = ()
    collectives: RankCollectives | None = None
    exposed_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of each collective, while nothing computes."""
    follows_compute: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """Which collectives begin as soon as compute has ended, with nothing to hide behind."""
    graph: Graph | None = None
    window_us: float = 0.0
    step_count: int = 1
    kernel_ns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number and total duration of the kernels that compute longest, by name."""
    products: Mapping[str, Products] = field(default_factory=dict)
    """Of kernels whose shapes are known, by name."""
    device_name: str = ""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Of process groups, by name, as far as the trace tells them."""

    @property
    def is_conclusive(self) -> bool:
        """Whether its numbers can be concluded from."""
        return self.budget is not None and all(message.severity is not Severity.FAILED for message in self.health)


def rank_part(trace: RankTrace) -> RankPart:
    """Analyse the trace of one rank. Findings are made only of a trace whose health does not fail."""
    sound = repaired(trace)
    trace = sound.trace
    health = [*sound.messages, *file_health(trace)]
    size = world_size(trace)
    if not trace.timeline.kinds(*DEVICE_KINDS).any():
        return RankPart(trace.file, trace.rank, size, tuple(health))
    view = RankView(trace)
    health += device_health(view)
    conclusive = all(message.severity is not Severity.FAILED for message in health)
    budget = budget_json(view)
    health += _unclassified(trace, budget)
    collectives = collectives_of(trace.timeline, trace.rank)
    starts, ends = collectives.start_ns, collectives.end_ns
    return RankPart(
        file=trace.file,
        rank=trace.rank,
        world_size=size,
        health=tuple(health),
        budget=budget,
        findings=tuple(finding for find in PATHOLOGIES for finding in find(view)) if conclusive else (),
        collectives=collectives,
        exposed_ns=(ends - starts) - view.compute.covered_ns(starts, ends),
        follows_compute=_follows_compute(view, starts),
        graph=view.graph if conclusive else None,
        window_us=view.window_us,
        step_count=view.step_count,
        kernel_ns=kernel_times(view),
        products=product_times(view),
        device_name=device_name(trace.facts),
        placements=placements(trace.facts),
    )


def _unclassified(trace: RankTrace, budget: Mapping[str, Any]) -> Iterator[HealthMessage]:
    found = budget["unclassified"]
    if found["share_of_busy"] > UNCLASSIFIED:
        names = ", ".join(kernel["name"][:60] for kernel in found["kernels"][:3])
        text = (
            f"kernels beside the main stream, {found['share_of_busy']:.1%} of busy time, have names that say neither "
            f"that they compute nor that they communicate ({names}): they count as compute"
        )
        yield HealthMessage("unclassified-kernels", Severity.WARNING, text, trace.file, (trace.rank,))


def _follows_compute(view: RankView, starts: NDArray[np.int64], within_ns: int = 20_000) -> NDArray[np.bool_]:
    if not len(view.compute):
        return np.zeros(len(starts), dtype=bool)
    last = np.searchsorted(view.compute.ends, starts, side="right") - 1
    follows: NDArray[np.bool_] = (last >= 0) & (starts - view.compute.ends[last] <= within_ns)
    return follows & ~view.compute.contains(starts)
