"""Why one plan beats another: from the difference of where their time goes."""

from headway.plan.search import Plan, Planned, worth
from headway.plan.whole_step import WholeStep
from headway.rehearse.memory import GIB

SMALL = 0.005
"""Of the slower step: a difference of a part that is not worth telling."""
MEANINGS = {
    "compute": "forward and backward passes",
    "recompute": "recomputation by activation checkpointing",
    "optimizer and norms": "the optimizer, norms and averages",
    "copies": "copies between device and host",
    "pipeline bubble": "waiting for other pipeline stages",
    "host": "waiting for the host's launches",
    "communication dp_shard": "exposed gathers and reductions of sharded parameters",
    "communication dp_replicate": "exposed reductions over replicas",
    "communication tp": "tensor parallelism's exposed communication",
    "communication cp_ring": "exposed rounds of keys and values",
    "communication cp_ulysses": "context parallelism's exposed all-to-alls",
    "communication ep": "expert parallelism's exposed exchanges",
    "communication expert_shard": "exposed gathers and reductions of experts",
    "communication pp": "exposed messages between stages",
}


def differences(first: WholeStep, second: WholeStep) -> list[tuple[str, float]]:
    """Seconds by which each part of the second's step is longer, the largest change first."""
    own, other = dict(first.shares.named()), dict(second.shares.named())
    names = list(dict.fromkeys([*own, *other]))
    changes = [(name, other.get(name, 0.0) - own.get(name, 0.0)) for name in names]
    return sorted(changes, key=lambda change: -abs(change[1]))


def explanation(planned: Planned) -> str:
    """One paragraph: why the first plan beats the second."""
    if len(planned.plans) < 2:
        return "There is one plan only, so nothing to compare it with."
    first, second = planned.plans[:2]
    ahead, behind = first.prediction.step_time_s, second.prediction.step_time_s
    gained = worth(second, planned.price) / worth(first, planned.price) - 1
    measure = "faster" if planned.price is None else "cheaper"
    told = [f"[1] {first.choice.name} is predicted {gained:.1%} {measure} than [2] {second.choice.name}"]
    told[0] += f" ({ahead.value:.4g} s a step against {behind.value:.4g} s)."
    told.append(_causes(differences(first.prediction, second.prediction), behind.value))
    told.append(_memory(first, second))
    if behind.low <= ahead.high:
        told.append(
            "Their ranges overlap: most of what is uncertain they have in common, yet a difference below a few percent "
            "is for a short run of both to decide."
        )
    return " ".join(sentence for sentence in told if sentence)


def _causes(changes: list[tuple[str, float]], step: float) -> str:
    saved = [(name, seconds) for name, seconds in changes if seconds > SMALL * step]
    paid = [(name, -seconds) for name, seconds in changes if -seconds > SMALL * step]
    if not saved and not paid:
        return "No single part of the step differs by more than half a percent of it."
    text = f"It saves {_listed(saved, step)}" if saved else "It saves little anywhere"
    return f"{text}, and pays {_listed(paid, step)} for it." if paid else f"{text}."


def _listed(parts: list[tuple[str, float]], step: float) -> str:
    told = [f"{_number(s)} s ({s / step:.0%} of the step) in {MEANINGS.get(name, name)}" for name, s in parts[:3]]
    return ", ".join(told[:-1]) + (" and " if len(told) > 1 else "") + told[-1]


def _number(seconds: float) -> str:
    return f"{seconds:.3g}"


def _memory(first: Plan, second: Plan) -> str:
    own, other = (plan.prediction.memory.peak.value / GIB for plan in (first, second))
    if abs(own - other) < 0.02 * max(own, other):
        return ""
    return f"It holds {own:.3g} GiB at its peak, the second {other:.3g} GiB."
