"""Fitting the few numbers of the cost model to measured times, by the relative error, and what range they leave."""

import numpy as np
from numpy.typing import ArrayLike

RANGE = (0.1, 0.9)
"""Quantiles of the measured times over the fitted ones that become the range of a rate."""


def fitted(work: ArrayLike, seconds: ArrayLike, besides: ArrayLike) -> tuple[float, float]:
    """The coefficients of ``seconds ≈ a · work + b · besides`` that leave the least squares of the relative errors.

    Where one of them would be negative, ``work`` alone is fitted: a time that falls with more work is noise.
    """
    times = np.asarray(seconds, dtype=np.float64)
    columns = np.stack([np.asarray(column, dtype=np.float64) / times for column in (work, besides)], axis=1)
    both, *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    if both[0] > 0 and both[1] >= 0:
        return float(both[0]), float(both[1])
    return float(columns[:, 0].sum() / (columns[:, 0] ** 2).sum()), 0.0


def ranged(rate: float, measured: ArrayLike, modelled: ArrayLike) -> list[float]:
    """``[value, low, high]`` of a rate whose times were ``measured`` and are ``modelled`` with it."""
    ratios = np.asarray(measured, dtype=np.float64) / np.asarray(modelled, dtype=np.float64)
    slow, fast = np.quantile(ratios, RANGE[1]), np.quantile(ratios, RANGE[0])
    return [rounded(rate), rounded(rate / max(1.0, slow)), rounded(rate / min(1.0, fast))]


def spread(rates: ArrayLike) -> list[float]:
    """``[value, low, high]``: the geometric mean of rates, and the least and largest of them."""
    given = np.asarray(rates, dtype=np.float64)
    return [rounded(float(np.exp(np.log(given).mean()))), rounded(given.min()), rounded(given.max())]


def rounded(number: float) -> float:
    """To four digits: no measurement here has more."""
    return float(f"{number:.4g}")
