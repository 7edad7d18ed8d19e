"""The search for a plan: all candidates analysed at once, and of those that fit the best rehearsed whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erfc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.cost import Estimate
from headway.errors import UserError
from headway.plan.analytic import Analysis, analyse, out_of_memory
from headway.plan.choice import Choice, Precision
from headway.plan.preparation import check_recipe, prepare
from headway.plan.rules import Rules
from headway.plan.search_space import PRECISIONS, Candidates, Rejections, search_space
from headway.plan.whole_step import WholeStep, whole_step
from headway.recipe import Recipe
from headway.rehearse import check_devices
from headway.rehearse.memory import GIB
from headway.rehearse.program import CPU

FITS = 0.5
"""Where memory runs out more likely than not there is no plan."""
REHEARSED_AT_MOST = 3
"""Times as many as are asked for: of those that should fit some may not."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Analysed:
    """All candidates with their times and memory."""

    candidates: Candidates
    analysis: Analysis
    oom: Floats
    """Chance of running out of memory."""
    rejections: Rejections
    rehearsals: int
    """Of blocks."""
    seconds: float
    """Of the analytic pass: enumeration, formulas and ranking, without rehearsals."""
    rehearsing_seconds: float

    def ranked(self, price: float | None = None) -> NDArray[np.int64]:
        """Places of the candidates that fit, fastest first; with a ``price`` cheapest first."""
        worth = np.asarray(self.analysis.step_ns.value)
        if price is not None:
            worth = worth * self.candidates["devices"]
        order = np.lexsort((np.asarray(self.analysis.memory.value), worth))
        return order[self.oom[order] <= FITS]


@dataclass(frozen=True)
class Plan:
    """A candidate that was rehearsed whole."""

    choice: Choice
    place: int
    """Among the candidates."""
    analytic_rank: int
    """From 1."""
    prediction: WholeStep


@dataclass(frozen=True)
class Planned:
    """The result of a search."""

    recipe: Recipe
    cluster: Cluster
    analysed: Analysed
    plans: tuple[Plan, ...]
    """Best first."""
    price: float | None
    """Of a device and hour."""
    seconds: float


def plan(
    recipe: Recipe,
    cluster: Cluster,
    devices: Sequence[int],
    *,
    top: int = 5,
    price: float | None = None,
    precisions: Sequence[Precision] | None = None,
    on_rehearsed: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Search for the best ways to run ``recipe`` on one of ``devices`` devices of ``cluster``.

    ``top``: how many are rehearsed whole and returned; ``price``: rank by cost in place of time. ``on_rehearsed`` is
    told each one; ``precisions``: see ``analyse_all``. Raises UserError where nothing divides or fits, with why.
    """
    began = time.monotonic()
    found = analyse_all(recipe, cluster, devices, precisions)
    order = found.ranked(price)
    if not len(order):
        raise UserError(_why_nothing_fits(recipe, cluster, found))
    plans: list[Plan] = []
    for rank, place in enumerate(order[: REHEARSED_AT_MOST * top].tolist(), start=1):
        choice = found.candidates.choice(place)
        on_rehearsed(f"rehearsing {choice.name}")
        try:
            prediction = whole_step(recipe, choice, cluster)
        except UserError as error:
            found.rejections.add(f"it can't be rehearsed: {error}", choice.name)
            continue
        chance = prediction.out_of_memory_probability or 0.0
        if chance > FITS:
            need = prediction.memory.needed.value / GIB
            found.rejections.add(f"out of memory when rehearsed whole: {need:.0f} GiB of a device", choice.name)
            continue
        plans.append(Plan(choice, place, rank, prediction))
        if len(plans) == top:
            break
    if not plans:
        raise UserError(_why_nothing_fits(recipe, cluster, found))
    plans.sort(key=lambda one: worth(one, price))
    return Planned(recipe, cluster, found, tuple(plans), price, time.monotonic() - began)


def analyse_all(
    recipe: Recipe,
    cluster: Cluster,
    devices: Sequence[int],
    precisions: Sequence[Precision] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Analysed:
    """Every candidate's time and memory, from rehearsed blocks. Raises UserError where nothing divides.

    ``precisions``: None for the recipe's own and those that may be faster; on an accelerator float32 is not.
    ``clock``: what ``seconds`` are counted by.
    """
    check_recipe(recipe)
    if precisions is None:
        on_cpu = cluster.accelerator.form == CPU
        precisions = [one for one in PRECISIONS if on_cpu or one in ("bfloat16", recipe.precision.compute)]
    for count in devices:
        check_devices(cluster, count)
    rules = Rules(recipe)
    began = clock()
    candidates, rejections = search_space(recipe, devices, rules, precisions)
    enumerated = clock()
    prepared = prepare(recipe, cluster, rules, candidates)
    rehearsed = clock()
    analysis = analyse(cluster, candidates, prepared.rows, prepared.one, prepared.two)
    oom = out_of_memory(analysis.needed, cluster, erfc)
    ended = clock()
    found = Analysed(
        candidates,
        analysis,
        oom,
        rejections,
        prepared.rehearsals,
        enumerated - began + ended - rehearsed,
        rehearsed - enumerated,
    )
    _reject_what_does_not_fit(found, cluster)
    return found


def worth(plan: Plan, price: float | None) -> float:
    """What plans are ranked by: seconds of a step, or its cost."""
    seconds = plan.prediction.step_time_s.value
    return seconds if price is None else cost_of_step(seconds, plan.choice.devices, price)


def cost_of_step(seconds: float, devices: int, price: float) -> float:
    """In the currency of ``price``, which is of a device and hour."""
    return seconds * devices * price / 3600


def _reject_what_does_not_fit(found: Analysed, cluster: Cluster) -> None:
    """Counted by what takes up the memory: what checkpointing and sharding leave."""
    full = found.oom > FITS
    for checkpointing in np.unique(found.candidates["checkpointing"][full]):
        here = np.flatnonzero(full & (found.candidates["checkpointing"] == checkpointing))
        needed = np.asarray(found.analysis.needed.value)[here] / GIB
        least = here[int(np.argmin(needed))]
        choice = found.candidates.choice(int(least))
        found.rejections.add(
            f"out of memory with activation checkpointing {choice.checkpointing}: {needed.min():.0f} GiB or more of "
            f"{cluster.accelerator.memory_gb:.0f} GB",
            choice.name,
            len(here),
        )


def _why_nothing_fits(recipe: Recipe, cluster: Cluster, found: Analysed) -> str:
    needed: Estimate = found.analysis.needed
    least = int(np.argmin(np.asarray(needed.value)))
    gib = np.asarray(needed.value)[least] / GIB
    return (
        f"no layout of {recipe.model.class_name} fits {cluster.accelerator.memory_gb:.0f} GB devices of "
        f"{cluster.name}: the least, {found.candidates.choice(least).name}, needs about "
        f"{gib:.0f} GiB; give more devices (--devices), or a smaller model or sequence"
    )


def ranged(estimate: Estimate, place: int, factor: float = 1.0) -> dict[str, float]:
    """One element of an estimate, as commands write it."""
    return {
        "value": float(np.asarray(estimate.value)[place]) * factor,
        "low": float(np.asarray(estimate.low)[place]) * factor,
        "high": float(np.asarray(estimate.high)[place]) * factor,
    }


def json_of(planned: Planned) -> dict[str, Any]:
    """The result of ``headway plan``."""
    found = planned.analysed
    return {
        "cluster": planned.cluster.name,
        "evaluated": len(found.candidates),
        "seconds": planned.seconds,
        "analytic_seconds": found.seconds,
        "rehearsed_blocks": found.rehearsals,
        "plans": [_plan_json(planned, one) for one in planned.plans],
        "rejected": found.rejections.as_json(),
    }


def _plan_json(planned: Planned, one: Plan) -> dict[str, Any]:
    found, choice = planned.analysed, one.choice
    price = planned.price
    row: dict[str, Any] = {
        "devices": choice.devices,
        "layout": choice.as_json(),
        "micro_batch": choice.micro_batch,
        "activation_checkpointing": choice.checkpointing,
        "precision": choice.precision,
        "prediction": one.prediction.as_json(),
        "analytic": {
            "rank": one.analytic_rank,
            "step_time_s": ranged(found.analysis.step_ns, one.place, 1e-9),
            "peak_memory_gib": ranged(found.analysis.memory, one.place, 1 / GIB),
            "oom_probability": float(found.oom[one.place]),
            "breakdown": breakdown_s(found.analysis, one.place),
        },
        "overrides": choice.overrides(planned.recipe),
    }
    if price is not None:
        step = one.prediction.step_time_s
        row["cost_of_step"] = {
            end: cost_of_step(getattr(step, end), choice.devices, price) for end in ("value", "low", "high")
        }
    return row


def breakdown_s(analysis: Analysis, place: int) -> dict[str, float]:
    """Seconds of each part of one candidate's step."""
    size = np.asarray(analysis.memory.value).shape
    found = {
        name: float(np.broadcast_to(np.asarray(time.value), size)[place]) * 1e-9
        for name, time in analysis.parts.times.items()
    }
    return {name: seconds for name, seconds in found.items() if seconds > 0}
