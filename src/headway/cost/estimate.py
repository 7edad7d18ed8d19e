"""An estimated time with its range."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Number = float | NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A time in ns: what is expected, and the range that the sources of its numbers span. Numbers or arrays.

    Estimates add up end by end: what they have in common (one efficiency, one bandwidth) does not average out.
    """

    value: Number
    low: Number
    high: Number
    __array_ufunc__ = None  # an array times an estimate is an estimate, not an array of them

    @staticmethod
    def exactly(nanoseconds: Number) -> "Estimate":
        """A time that is known."""
        return Estimate(nanoseconds, nanoseconds, nanoseconds)

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)

    def __mul__(self, times: Number) -> "Estimate":
        return Estimate(self.value * times, self.low * times, self.high * times)

    __rmul__ = __mul__

    def sooner(self, other: "Estimate") -> "Estimate":
        """The shorter of two ways to do the same."""
        return self._each(other, np.minimum)

    def later(self, other: "Estimate") -> "Estimate":
        """The longer of two things that run beside each other."""
        return self._each(other, np.maximum)

    def _each(self, other: "Estimate", choose: Any) -> "Estimate":
        return Estimate(choose(self.value, other.value), choose(self.low, other.low), choose(self.high, other.high))


def numbers(given: ArrayLike) -> Number:
    """``given`` in double precision: shapes and bytes are computed with as floats."""
    array = np.asarray(given, dtype=np.float64)
    return array if array.ndim else float(array)
