"""A cluster brought in line with a run: the one rate that most of the step hangs on, and the memory of a process.

A run measures one time. It can tell one number, and which one is told by what is uncertain: the parts of the cluster
(the device, the host, each level of links) are weighed by how far their ranges move the step, and the part that moves
it most is scaled until the predicted step takes as long as the measured one. All its rates are scaled alike, as a
clock, a power limit or a busy link would. The others stay; what they may be off by widens the range of what was found.
"""

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.calibrate.fit import rounded
from headway.cluster import Cluster, parse_cluster
from headway.errors import UserError
from headway.recipe import load_recipe
from headway.rehearse import Prediction, Ranged, predict, rehearse, roles
from headway.runs import Measured, RunDirectory, measured

DEVICE, HOST = "device", "host"
"""Parts of a cluster; the others are levels of links, by name. On a CPU the host is part of the device."""
SOURCES = {
    DEVICE: ("matrix products", "attention", "memory-bound operators", "compiled kernels"),
    HOST: ("host",),
}
"""Of errors of a prediction, by part."""
UNSAID = 0.05
"""That every part may be off by besides its own range: a range that is too narrow must not hide it."""
NUDGE = 1.1
"""By which a part is scaled to see what hangs on it."""
TRIES, NEAR, SUFFICES = 8, 0.003, 0.03
"""Predictions to find the factor, the relative distance to stop at, and the one that is no success any more."""
LIMITS = (1 / 32, 32.0)
"""Of a factor."""
QUARTILE = 0.6745
PROBABLE = 1.2816
"""Standard deviations from the middle of a normal distribution to a quartile, and to an end of four fifths."""


@dataclass(frozen=True)
class FromRun:
    """What a run taught."""

    cluster: Cluster
    """The one that was given, brought in line."""
    run: Path
    part: str
    factor: float
    """What the rates of ``part`` were multiplied with."""
    share: float
    """By how much of a percent the step is shorter when they are a percent higher."""
    predicted_s: Ranged
    """Of a step, before."""
    corrected_s: Ranged
    """And with what was learned."""
    measured: Measured
    process_gib: float | None
    """Memory of a process that was learned; None: the device's memory is not a process's."""

    def as_json(self) -> dict[str, Any]:
        """As ``headway plan`` writes it."""
        return {
            "run": str(self.run),
            "part": self.part,
            "factor": self.factor,
            "share": self.share,
            "predicted_step_time_s": self.predicted_s.as_json(),
            "corrected_step_time_s": self.corrected_s.as_json(),
            "measured_step_time_s": self.measured.step_time_s,
            "process_gib": self.process_gib,
        }


def calibrate_from(run: Path, cluster: Cluster) -> FromRun:
    """Bring ``cluster`` in line with the last session of ``run``, which was trained on such a cluster.

    Raises UserError for what is no run or measured nothing yet, for a step that no factor of one part explains, and for
    rates that would be above the peak of a catalogued device.
    """
    found = measured(run) if RunDirectory(run).recipe_file.exists() else None
    if found is None:
        raise UserError(
            f"{run} is no run directory whose metrics.jsonl has steps after the warm-up of its last session"
        )
    recipe = load_recipe(RunDirectory(run).recipe_file)
    records = [rehearse(recipe, found.ranks, role.rank) for role in roles(recipe, found.ranks)]

    def on(other: Cluster) -> Prediction:
        return predict(records, other)

    before = on(cluster)
    part, share = _part(on, cluster, before)
    factor = _factor(on, cluster, part, share, found, run)
    learned = _scaled(cluster, part, factor)
    _check_peaks(learned, run)
    widened = _widened(learned, part, _doubt(before, part, share, found, cluster))
    process = _process_gib(before, found, cluster)
    text = f"{part} × {factor:.3g} by the run {run}, {datetime.date.today().isoformat()}"
    told = _told(widened, part, process, text)
    return FromRun(
        told, run, part, factor, share, before.step_time_s, on(told).step_time_s, found, process and process[0]
    )


def parts(cluster: Cluster) -> list[str]:
    """What a run can tell of."""
    own = [DEVICE] if _is_cpu(cluster) else [DEVICE, HOST]
    return own + [level.name for level in cluster.levels]


def _is_cpu(cluster: Cluster) -> bool:
    return cluster.accelerator.form == "CPU"


def _sources(cluster: Cluster, part: str) -> tuple[str, ...]:
    own = SOURCES.get(part, (part,))
    return own + SOURCES[HOST] if part == DEVICE and _is_cpu(cluster) else own


def _error_s(prediction: Prediction, sources: tuple[str, ...]) -> float:
    """By how much the step moves, up or down, within the ranges of ``sources``."""
    errors = prediction.simulation.errors_ns
    return math.hypot(*(sum(errors.get(source, (0.0, 0.0))) / 2e9 for source in sources))


def _part(on: Callable[[Cluster], Prediction], cluster: Cluster, before: Prediction) -> tuple[str, float]:
    """The part whose uncertainty moves the step most, and the share of the step that goes with its rates."""
    shares = {part: _share(before, on(_scaled(cluster, part, NUDGE))) for part in parts(cluster)}
    step = before.step_time_s.value
    moved = {part: _error_s(before, _sources(cluster, part)) + UNSAID * shares[part] * step for part in shares}
    part = max(moved, key=lambda name: moved[name])
    return part, shares[part]


def _share(before: Prediction, nudged: Prediction) -> float:
    return max(math.log(before.step_time_s.value / nudged.step_time_s.value) / math.log(NUDGE), 1e-3)


def _factor(
    on: Callable[[Cluster], Prediction], cluster: Cluster, part: str, share: float, found: Measured, run: Path
) -> float:
    """What to multiply the rates of ``part`` with so that the step is as long as measured."""
    factor, slope = 1.0, share
    tried: list[tuple[float, float, float]] = []
    for _ in range(TRIES):
        step = on(_scaled(cluster, part, factor)).step_time_s.value
        off = math.log(step / found.step_time_s)
        tried.append((factor, off, step))
        if abs(off) < NEAR:
            break
        if len(tried) > 1 and factor != tried[-2][0]:
            slope = max((tried[-2][1] - off) / math.log(factor / tried[-2][0]), 0.02)
        factor = min(max(factor * math.exp(off / slope), LIMITS[0]), LIMITS[1])
    factor, off, step = min(tried, key=lambda one: abs(one[1]))
    if abs(off) > SUFFICES:
        raise UserError(
            f"{run} took {found.step_time_s:.4g} s a step where {tried[0][2]:.4g} s were predicted: no rate of the "
            f"{part}, which most of it hangs on, explains that (at × {factor:.3g} it is {step:.4g} s). Measure the "
            "machine with headway calibrate"
        )
    return factor


def _doubt(before: Prediction, part: str, share: float, found: Measured, cluster: Cluster) -> float:
    """Relative half of the range that a factor of ``part`` has: what else may have moved the step."""
    others = tuple(source for source in before.simulation.errors_ns if source not in _sources(cluster, part))
    rest = _error_s(before, others) / before.step_time_s.value
    noise = PROBABLE / QUARTILE * (found.high_s - found.low_s) / 2 / found.step_time_s / math.sqrt(found.lines)
    return math.hypot(rest, noise) / share


def _check_peaks(cluster: Cluster, run: Path) -> None:
    for precision, rate in cluster.achieved.matrix.items():
        if rate.efficiency.value > 1 and not _is_cpu(cluster):
            raise UserError(
                f"{run} was faster than {cluster.accelerator.name} can be: its {precision} products would reach "
                f"{rate.efficiency.value:.0%} of the peak. Was it trained on another device, or on more of them?"
            )


def _process_gib(before: Prediction, found: Measured, cluster: Cluster) -> tuple[float, float, float] | None:
    """Memory of a process without its tensors: what was measured less what the step holds, with its range."""
    if not _is_cpu(cluster) or found.peak_memory_gib is None:
        return None
    first = before.memories[0]
    held = first.peak_bytes / 2**30
    tensors = first.peak.scaled(1 / 2**30)
    usual = cluster.achieved.host.process_gib
    down, up = (usual.value - usual.low, usual.high - usual.value) if usual else (0.0, 0.0)
    own = max(found.peak_memory_gib - held, 0.01)
    low = own - max(tensors.high - tensors.value - up, 0.0)
    high = own + max(tensors.value - tensors.low - down, 0.0)
    return rounded(own), rounded(max(min(low, own), 0.0)), rounded(max(high, own))


# What a part is in a cluster's document


def _scaled(cluster: Cluster, part: str, factor: float) -> Cluster:
    """The cluster with all rates of ``part`` multiplied by ``factor``: its times are shorter by that."""

    def faster(rate: dict[str, float]) -> dict[str, float]:
        return {end: rounded(value * factor) for end, value in rate.items()}

    def shorter(rate: dict[str, float]) -> dict[str, float]:
        return {end: rounded(value / factor) for end, value in rate.items()}

    return _changed(cluster, part, faster, shorter)


def _widened(cluster: Cluster, part: str, doubt: float) -> Cluster:
    """The cluster with the ranges of ``part`` widened by a relative ``doubt``."""

    def wider(rate: dict[str, float]) -> dict[str, float]:
        value = rate["value"]
        down = math.hypot(math.log(value / max(rate["low"], 1e-3 * value)), doubt)
        up = math.hypot(math.log(rate["high"] / value), doubt)
        return {
            "value": value,
            "low": rounded(min(value * math.exp(-down), value)),
            "high": rounded(max(value * math.exp(up), value)),
        }

    return _changed(cluster, part, wider, wider)


Change = Callable[[dict[str, float]], dict[str, float]]


def _changed(cluster: Cluster, part: str, rate: Change, time: Change) -> Cluster:
    """The cluster with what ``rate`` and ``time`` make of the rates and times of ``part``."""
    document = cluster.model_dump(mode="json", exclude_none=True)
    achieved = document["achieved"]
    host = part == HOST or (part == DEVICE and _is_cpu(cluster))
    if host:
        achieved["host"]["operator_us"] = time(achieved["host"]["operator_us"])
    if part == DEVICE:
        for product in achieved["matrix"].values():
            product["efficiency"] = rate(product["efficiency"])
        for kernel in achieved["attention"].values():
            for direction in ("forward", "backward"):
                kernel[direction] = {size: rate(own) for size, own in kernel[direction].items()}
        for memory in (achieved["memory"], achieved["memory"].get("cache")):
            if memory is not None:
                memory["fraction"] = {kind: rate(own) for kind, own in memory["fraction"].items()}
    for level in document["levels"]:
        if level["name"] == part:
            _change_links(level["achieved"], rate)
    return _parsed(document)


def _change_links(achieved: dict[str, Any], rate: Change) -> None:
    for key in ("efficiency", "all_to_all_efficiency", "in_network_efficiency"):
        if key in achieved:
            achieved[key] = rate(achieved[key])
    for kind in achieved["kinds"].values():
        kind["efficiency"] = rate(kind["efficiency"])


def _told(cluster: Cluster, part: str, process: tuple[float, float, float] | None, text: str) -> Cluster:
    """The cluster with its memory of a process, and with ``text`` behind the sources of all that was changed."""
    document = cluster.model_dump(mode="json", exclude_none=True)
    achieved = document["achieved"]
    changed: list[dict[str, Any]] = [document]
    if part == DEVICE:
        changed += [*achieved["matrix"].values(), *achieved["attention"].values(), achieved["memory"]]
    if part == HOST or process is not None:
        changed.append(achieved["host"])
    changed += [level["achieved"] for level in document["levels"] if level["name"] == part]
    for one in changed:
        one["source"] = "; ".join(filter(None, (one.get("source", ""), text)))
    if process is not None:
        achieved["host"]["process_gib"] = list(process)
    return _parsed(document)


def _parsed(document: dict[str, Any]) -> Cluster:
    return parse_cluster(document | {"units_checked": True}, source="calibrate-from")
