"""From the findings of a layout's ranks to a verdict: errors, bounds, and the first parameter that differs."""

import itertools
import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headway.check.examination import Difference, Differences, Findings
from headway.check.layouts import Layout
from headway.check.reference import Reference

FLOOR = 1e-2
"""A parameter's scale is at least this share of the median one: some gradients are zero but for rounding (the biases of
keys, which softmax ignores), and to be wrong by 1e-2 of nothing is no fault."""
QUANTITIES = {
    "grad_error": ("gradient",),
    "update_error": ("weights_1", "weights_3"),
    "ema_error": ("ema_3",),
    "reload_error": ("reload_weights_3", "reload_ema_3"),
}
"""Error of a result -> what it is the largest error of."""
ERRORS = ("loss_error", "grad_error", "grad_norm_error", "update_error", "ema_error", "reload_error")
BOUNDS = {
    "loss_error": 1e-5,
    "grad_error": 1e-5,
    "grad_norm_error": 5e-5,
    "update_error": 1e-4,
    "ema_error": 1e-4,
    "reload_error": 1e-4,
}
"""float32: what differs is the order of summation. Errors are relative: of the loss and the gradient norm over all
steps, of tensors to the largest absolute element (of the gradient, or of the change since the start)."""


@dataclass(frozen=True)
class FirstDifference:
    """Where a layout goes wrong first, in the order of the model."""

    parameter: str
    module: str
    quantity: str
    error: float
    ratio: float | None
    """Norm of the layout's tensor over the reference's: 0.5 or 2 tells of a scale, 1 of a permutation."""
    parameters: int
    """How many parameters differ in this quantity."""


@dataclass(frozen=True)
class LayoutResult:
    """What the check of one layout came to."""

    layout: str
    ranks: int
    overrides: dict[str, dict[str, Any]]
    status: Literal["passed", "wrong", "failed", "refused"]
    """failed: it crashed or hung; refused: Headway says beforehand that it does not work."""
    reason: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    first_difference: FirstDifference | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool | None:
        """None when it was refused."""
        return None if self.status == "refused" else self.status == "passed"

    def as_json(self) -> dict[str, Any]:
        """As in a result of the command."""
        return {
            "layout": self.layout,
            "ranks": self.ranks,
            "overrides": self.overrides,
            "status": self.status,
            "passed": self.passed,
            "reason": self.reason,
            **{name: _number(self.errors.get(name)) for name in ERRORS},
            "first_difference": asdict(self.first_difference) if self.first_difference else None,
            "seconds": round(self.seconds, 3),
        }


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return None if value is None or not math.isfinite(value) else value


def judge(
    layout: Layout,
    ranks: list[Findings],
    elsewhere: Differences | str,
    reference: Reference,
    bounds: dict[str, float],
    seconds: float,
) -> LayoutResult:
    """The verdict on ``layout`` from what each of its ranks found, within ``bounds`` (by error).

    ``elsewhere``: what one device found that went on from the layout's checkpoint, or why it could not.
    """
    tensors = _TensorErrors(reference, [found.differences for found in ranks])
    missing = sorted({name for found in ranks for name in found.without_gradient}, key=tensors.order.__getitem__)
    tensors.without_gradient(missing)
    problems = [problem for found in ranks[:1] for problem in found.problems]
    if missing:
        problems.append(f"{len(missing)} of {len(reference.parameters)} parameters have no gradient: {missing[0]}, …")
    problems += _not_held(reference, ranks) + _replicas_apart(reference, ranks)
    if isinstance(elsewhere, str):
        problems.append(f"one device can't go on from the checkpoint: {elsewhere}")
    else:
        tensors.add([elsewhere])
    errors = {
        "loss_error": _series_error([found.losses for found in ranks], reference.losses),
        "grad_norm_error": _series_error([found.grad_norms for found in ranks], reference.grad_norms),
        **{error: max(map(tensors.largest, quantities)) for error, quantities in QUANTITIES.items()},
    }
    if any(found.samples != reference.samples for found in ranks):
        problems.append(f"{ranks[0].samples} samples were counted, not {reference.samples}")
    above = [name for name in ERRORS if not errors[name] <= bounds[name]]
    problems += [f"{name} {errors[name]:.1e} is above {bounds[name]:.1e}" for name in above]
    return LayoutResult(
        layout=layout.name,
        ranks=layout.ranks,
        overrides=layout.overrides,
        status="wrong" if problems else "passed",
        reason="; ".join(problems) or None,
        errors={name: errors[name] for name in ERRORS},
        first_difference=tensors.first_above(bounds),
        seconds=seconds,
    )


class _TensorErrors:
    """Errors by quantity and parameter, over all ranks."""

    def __init__(self, reference: Reference, found: list[Differences]) -> None:
        self.parameters = {parameter.name: parameter for parameter in reference.parameters}
        self.order = {name: number for number, name in enumerate(self.parameters)}
        self.errors: dict[str, dict[str, float]] = {}
        self.ratios: dict[str, dict[str, float | None]] = {}
        self.add(found)

    def add(self, found: list[Differences]) -> None:
        """Take in what some ranks found, which may be quantities that others have found already."""
        for quantity in {quantity for part in found for quantity in part}:
            named = [(name, d) for part in found for name, d in part.get(quantity, {}).items()]
            scales = self._scales(quantity)
            errors, ratios = self.errors.setdefault(quantity, {}), self.ratios.setdefault(quantity, {})
            for name, group in itertools.groupby(sorted(named, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
                differences = [difference for _, difference in group]
                error = max(difference.largest for difference in differences) / scales[name]
                if error >= errors.get(name, 0.0):
                    errors[name], ratios[name] = error, _norm_ratio(differences)

    def _scales(self, quantity: str) -> dict[str, float]:
        key = quantity.removeprefix("reload_")
        known = {name: parameter.scales[key] for name, parameter in self.parameters.items() if key in parameter.scales}
        floor = max(FLOOR * statistics.median(known.values()), 1e-30) if known else 1e-30
        return {name: max(known.get(name, 0.0), floor) for name in self.parameters}

    def without_gradient(self, names: list[str]) -> None:
        """No gradient is one of zeros."""
        self.errors.setdefault("gradient", {}).update(dict.fromkeys(names, 1.0))
        self.ratios.setdefault("gradient", {}).update(dict.fromkeys(names, 0.0))

    def largest(self, quantity: str) -> float:
        """The largest error of any parameter; infinite when none was compared."""
        return max(self.errors.get(quantity, {}).values(), default=math.inf)

    def first_above(self, bounds: dict[str, float]) -> FirstDifference | None:
        """The first parameter, in the order of the model, of the first quantity in which any is above its bound."""
        for error, quantities in QUANTITIES.items():
            for quantity in quantities:
                above = [name for name, value in self.errors.get(quantity, {}).items() if not value <= bounds[error]]
                if above:
                    name = min(above, key=self.order.__getitem__)
                    return FirstDifference(
                        parameter=name,
                        module=self.parameters[name].module,
                        quantity=quantity,
                        error=self.errors[quantity][name],
                        ratio=self.ratios[quantity][name],
                        parameters=len(above),
                    )
        return None


def _norm_ratio(differences: list[Difference]) -> float | None:
    """Of the whole tensor; of a piece that several ranks have, the one farthest from the reference counts."""
    pieces = {d.piece: d for d in sorted(differences, key=lambda d: d.largest)}
    there = sum(d.squared_there for d in pieces.values())
    return math.sqrt(sum(d.squared_here for d in pieces.values()) / there) if there else None


def _series_error(ranks: list[list[float]], expected: list[float]) -> float:
    """The largest relative error of any step on any rank."""
    errors = [abs(here - there) / abs(there) for series in ranks for here, there in zip(series, expected, strict=True)]
    return max((math.inf if math.isnan(error) else error for error in errors), default=math.inf)


def _not_held(reference: Reference, ranks: list[Findings]) -> list[str]:
    """Trained parameters of which the ranks together hold only a part, or nothing."""
    incomplete = []
    for parameter in reference.parameters:
        pieces = {found.checksums[parameter.name][0] for found in ranks if parameter.name in found.checksums}
        if sum(piece.numel() for piece in pieces) != math.prod(parameter.shape):
            incomplete.append(parameter.name)
    unknown = {name for found in ranks for name in found.checksums} - {p.name for p in reference.parameters}
    problems = [f"{len(incomplete)} parameters are on no rank, or in part: {incomplete[0]}, …"] if incomplete else []
    return problems + ([f"parameters that the model does not have: {', '.join(sorted(unknown))}"] if unknown else [])


def _replicas_apart(reference: Reference, ranks: list[Findings]) -> list[str]:
    """Parameters that are not bit for bit the same on all ranks that have the same piece of them."""
    apart = []
    for parameter in reference.parameters:
        held = [found.checksums[parameter.name] for found in ranks if parameter.name in found.checksums]
        if len(set(held)) > len({piece for piece, _ in held}):
            apart.append(parameter.name)
    return [f"{len(apart)} parameters differ between ranks that should hold the same: {apart[0]}, …"] if apart else []


def refused(layout: Layout, reason: str) -> LayoutResult:
    """A layout that Headway says beforehand does not work."""
    return LayoutResult(layout.name, layout.ranks, layout.overrides, "refused", reason)


def failed(layout: Layout, reason: str, seconds: float) -> LayoutResult:
    """A layout that crashed or hung."""
    return LayoutResult(layout.name, layout.ranks, layout.overrides, "failed", reason, seconds=seconds)
