"""AdamW as one operator over many tensors: clip, moments, update, stochastic rounding, averages; one pass of memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels import adamw_reference
from headway.kernels.stochastic_rounding import Place

FIELDS = 5
"""Integers that say a place."""


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding of the weights: where each tensor's elements lie, the key of its numbers, and the step."""

    places: list[Place]
    keys: list[int]
    step: int


@dataclass(frozen=True)
class Average:
    """An exponential moving average: its tensors, float32, move by ``weight`` towards the weights."""

    tensors: list[Tensor]
    weight: float


def adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decays: list[float],
    updates: int,
    scale: Tensor,
    averages: list[Average] | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Update ``weights``, both moments and ``averages`` in place; nothing else is written to.

    Args:
        weights: contiguous, of one floating dtype and device; bfloat16 with ``rounding``.
        gradients, exp_avgs, exp_avg_sqs: of the weights' shapes; moments in float32 (float64 for float64 weights).
        updates: how many updates there were with this one (for bias correction).
        scale: float32 scalar on the weights' device that gradients are multiplied by: the clip coefficient, or 1.
    Raises:
        ValueError: tensors do not go together, or rounding is asked of weights other than bfloat16.
    Every number depends on its own element alone: shards give the bits that the whole tensors would give.
    """
    averages = averages or []
    _check(weights, gradients, exp_avgs, exp_avg_sqs, averages, rounding)
    if not weights:
        return
    adamw_update(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [tensor for average in averages for tensor in average.tensors],
        scale,
        [1 - lr * decay for decay in weight_decays],
        [average.weight for average in averages],
        lr / (1 - betas[0] ** updates),
        *betas,
        eps,
        math.sqrt(1 - betas[1] ** updates),
        [number for place in rounding.places for number in vars(place).values()] if rounding else [],
        rounding.keys if rounding else [],
        rounding.step if rounding else 0,
    )


def _check(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    averages: list[Average],
    rounding: Rounding | None,
) -> None:
    lists = {"gradients": gradients, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {f"averages[{number}]": average.tensors for number, average in enumerate(averages)}
    for name, tensors in lists.items():
        if [tensor.shape for tensor in tensors] != [weight.shape for weight in weights]:
            raise ValueError(f"adamw_: {name} have not the shapes of the weights")
    if len({(weight.dtype, weight.device) for weight in weights}) > 1:
        raise ValueError("adamw_: weights are of several dtypes or devices")
    for name, tensors in {"weights": weights, **lists}.items():
        if name != "gradients" and not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"adamw_: {name} are not all contiguous, and are written in place")
    if rounding is not None and (len(rounding.places) != len(weights) or len(rounding.keys) != len(weights)):
        raise ValueError("adamw_: rounding needs a place and a key for each tensor")
    if rounding is not None and weights and weights[0].dtype != torch.bfloat16:
        raise ValueError(f"adamw_: weights are {weights[0].dtype}; only bfloat16 is rounded to stochastically")


@torch.library.custom_op("headway::adamw", mutates_args=("weights", "exp_avgs", "exp_avg_sqs", "averages"))
def adamw_update(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    averages: list[Tensor],
    scale: Tensor,
    keeps: list[float],
    average_weights: list[float],
    step_size: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    correction: float,
    places: list[int],
    keys: list[int],
    step: int,
) -> None:
    """As ``adamw_reference.update``; ``places`` are five numbers for each tensor, or none."""
    adamw_reference.update(
        weights, gradients, exp_avgs, exp_avg_sqs, averages, scale, keeps, average_weights, step_size,
        (beta1, beta2), epsilon, correction, unpacked(places), keys, step,
    )  # fmt: skip


def unpacked(places: list[int]) -> list[Place]:
    """Places from the numbers that an operator is given."""
    return [Place(*places[first : first + FIELDS]) for first in range(0, len(places), FIELDS)]


@adamw_update.register_kernel("cuda")
def _(
    weights, gradients, exp_avgs, exp_avg_sqs, averages, scale, keeps, average_weights, step_size, beta1, beta2,
    epsilon, correction, places, keys, step,
):  # fmt: skip
    from headway.kernels import adamw_triton

    way = adamw_triton if adamw_triton.fits(weights, gradients, exp_avgs) else adamw_reference
    way.update(
        weights, gradients, exp_avgs, exp_avg_sqs, averages, scale, keeps, average_weights, step_size,
        (beta1, beta2), epsilon, correction, unpacked(places), keys, step,
    )  # fmt: skip


@adamw_update.register_fake
def _(*_: object) -> None:
    return None
