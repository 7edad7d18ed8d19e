"""How far a kernel may be off: measured in float64, judged by PyTorch's own operations in the same precision."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_RATIO = 2.0
"""Of a kernel's largest error to that of the same operations in PyTorch, as flash-attention's tests hold it."""
LARGEST_RMS_RATIO = 1.5
"""Of root mean squares: unlike the largest error it sees a bias that is everywhere."""


@dataclass(frozen=True)
class Verdict:
    """Of one result of a kernel. Errors are absolute, against float64."""

    name: str
    error: float
    eager_error: float
    excess: float
    """Largest of error − 2 · eager's largest error − 1 ulp, over all elements; at most 0 holds."""
    rms_error: float
    rms_allowed: float
    same_finite: bool
    """NaN and infinity stand where eager has them."""

    @property
    def passed(self) -> bool:
        """Whether all of it holds."""
        return self.same_finite and self.excess <= 0 and self.rms_error <= self.rms_allowed


def judge(name: str, result: Tensor, eager: Tensor, exact: Tensor) -> Verdict:
    """Hold ``result`` against ``exact`` (float64), with ``eager`` in the dtype of the result; all of one shape.

    Raises ValueError when shapes or dtypes are not those of eager.
    """
    if result.shape != eager.shape or result.dtype != eager.dtype:
        raise ValueError(f"{name}: {list(result.shape)} {result.dtype}, eager {list(eager.shape)} {eager.dtype}")
    finite = exact.isfinite() & eager.isfinite()
    same = torch.equal(result.isnan(), eager.isnan()) and torch.equal(result.isinf(), eager.isinf())
    if not finite.any() or not same:
        return Verdict(name, 0.0, 0.0, 0.0, 0.0, 0.0, same)
    reference = exact[finite]
    error = (result.double()[finite] - reference).abs()
    eager_error = (eager.double()[finite] - reference).abs()
    unit = torch.finfo(result.dtype).eps
    ulp = (unit * reference.abs()).clamp(min=torch.finfo(result.dtype).smallest_normal * unit)
    return Verdict(
        name,
        float(error.max()),
        float(eager_error.max()),
        float((error - LARGEST_RATIO * eager_error.max() - ulp).max()),
        _rms(error),
        LARGEST_RMS_RATIO * _rms(eager_error) + _rms(ulp) / 4,
        same,
    )


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
