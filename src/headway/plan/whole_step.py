"""The whole step of one candidate, rehearsed; of many accumulated micro-batches few are, and the rest follows.

Once all is at work each further round of micro-batches adds the same time, so that a step is affine in their number:
two rehearsals that differ by one round say what a step of any number takes. Without a pipeline a round is one
micro-batch (the first is unlike the others: nothing is added up yet), with one it is as many as it has ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.cluster import Cluster
from headway.plan.choice import Choice
from headway.recipe import Recipe
from headway.rehearse import Memory, Prediction, Ranged, Shares, predict, rehearse, roles
from headway.rehearse.memory import GIB


@dataclass(frozen=True)
class WholeStep:
    """What a step of a candidate comes to."""

    step_time_s: Ranged
    memory: Memory
    """Of the rank that comes nearest to its end."""
    shares: Shares
    rates: dict[str, float | None]
    """By the names of ``headway rehearse``: throughput of a device, and what share of its peak that is."""

    @property
    def out_of_memory_probability(self) -> float | None:
        """None where memory is shared with others (the CPU)."""
        return self.memory.out_of_memory_probability

    def as_json(self) -> dict[str, Any]:
        """The ``prediction`` of ``headway plan``, as ``headway rehearse`` has it."""
        return {
            "step_time_s": self.step_time_s.as_json(),
            "peak_memory_gib": self.memory.peak.scaled(1 / GIB).as_json(),
            **self.rates,
            "oom_probability": self.out_of_memory_probability,
            "breakdown": self.shares.as_json(),
        }


def whole_step(recipe: Recipe, choice: Choice, cluster: Cluster) -> WholeStep:
    """Rehearse ``choice`` on ``cluster``. Raises UserError for what can't be rehearsed."""
    data = choice.dp_replicate * choice.dp_shard
    wanted = recipe.run.global_batch // (data * choice.micro_batch)
    few, more = rounds(choice)
    if wanted <= more:
        return _told(_predicted(recipe, choice, cluster, wanted))
    one, two = (_told(_predicted(recipe, choice, cluster, count)) for count in (few, more))
    return _extended(one, two, (wanted - few) / (more - few), wanted / few)


def rounds(choice: Choice) -> tuple[int, int]:
    """Micro-batches of the two rehearsals."""
    if choice.pp == 1:
        return 2, 3
    first = 2 if choice.schedule == "dualpipev" else 1
    return first * choice.pp, (first + 1) * choice.pp


def _predicted(recipe: Recipe, choice: Choice, cluster: Cluster, micro_batches: int) -> Prediction:
    chosen = choice.applied_to(recipe)
    batch = choice.dp_replicate * choice.dp_shard * choice.micro_batch * micro_batches
    chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={"global_batch": batch})})
    records = (rehearse(chosen, choice.devices, role.rank) for role in roles(chosen, choice.devices))
    return predict(records, cluster)


def _told(prediction: Prediction) -> WholeStep:
    found = prediction.as_json()
    names = ("tokens_per_s_per_device", "samples_per_s_per_device", "tflops_per_device", "mfu", "hfu")
    rates = {name: found[name] for name in names}
    return WholeStep(prediction.step_time_s, prediction.memory, prediction.shares, rates)


def _extended(one: WholeStep, two: WholeStep, share: float, batches: float) -> WholeStep:
    """``one`` and ``share`` times what ``two`` has more; it does ``batches`` times the work of ``one``."""

    def along(own: float, more: float) -> float:
        return max(own + share * (more - own), 0.0)

    time = _ranged(one.step_time_s, two.step_time_s, along)
    memory = replace(
        two.memory,
        peak=_ranged(one.memory.peak, two.memory.peak, along),
        needed=_ranged(one.memory.needed, two.memory.needed, along),
    )
    faster = batches * one.step_time_s.value / time.value
    rates = {name: None if rate is None else rate * faster for name, rate in one.rates.items()}
    return WholeStep(time, memory, _shares(one.shares, two.shares, along), rates)


def _ranged(one: Ranged, two: Ranged, along: Callable[[float, float], float]) -> Ranged:
    value = along(one.value, two.value)
    return Ranged(value, min(along(one.low, two.low), value), max(along(one.high, two.high), value))


def _shares(one: Shares, two: Shares, along: Callable[[float, float], float]) -> Shares:
    found: dict[str, Any] = {}
    for field in fields(Shares):
        own, more = getattr(one, field.name), getattr(two, field.name)
        if isinstance(own, dict):
            found[field.name] = {axis: along(own.get(axis, 0.0), more.get(axis, 0.0)) for axis in sorted({*own, *more})}
        else:
            found[field.name] = along(own, more)
    return Shares(**found)
