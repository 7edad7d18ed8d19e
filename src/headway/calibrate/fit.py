"""Fitting the few numbers of the cost model to measured times, by the relative error, and what range they leave."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

RANGE = (0.1, 0.9)
"""Quantiles of the measured times over the fitted ones that become the range of a rate."""
OUTLIER = 2.5
"""A time that is off by this factor was disturbed."""


def fitted(work: ArrayLike, seconds: ArrayLike, besides: ArrayLike, call: ArrayLike = 0.0) -> tuple[float, float]:
    """The coefficients of ``seconds ≈ call + a · work + b · besides`` that leave the least squares of the relative
    errors; points that are then off by a factor of ``OUTLIER`` from the median one are left out, and the rest fitted
    again.

    Where a coefficient would be negative, ``work`` alone is fitted: a time that falls with more work is noise.
    """
    times = np.asarray(seconds, dtype=np.float64)
    columns = np.stack([np.asarray(column, dtype=np.float64) / times for column in (work, besides)], axis=1)
    wanted = 1 - np.asarray(call, dtype=np.float64) / times
    first = _solved(columns, wanted)
    ratios = 1 / (columns @ np.array(first) + 1 - wanted)
    usual = np.abs(np.log(ratios / np.median(ratios))) < np.log(OUTLIER)
    return _solved(columns[usual], wanted[usual])


def _solved(columns: NDArray[np.float64], wanted: NDArray[np.float64]) -> tuple[float, float]:
    both, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    if both[0] > 0 and both[1] >= 0:
        return float(both[0]), float(both[1])
    alone = float(columns[:, 0] @ wanted / (columns[:, 0] @ columns[:, 0]))
    return alone if alone > 0 else float(1 / columns[:, 0].max()), 0.0


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
