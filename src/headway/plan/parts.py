"""Times in parts, so that each part's uncertainty counts once.

Within a part (all matrix products, all collectives of an axis) errors have one cause and add up; between parts causes
differ, so that ranges add up as squares.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.cost import Estimate
from headway.cost.estimate import Number

PARTS = (
    "matrix",
    "attention",
    "memory",
    "host",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "data",
    "optimizer",
    "scale",
    "release",
)
"""What a step's time is made of: matrix products; attention; memory-bound operators; the host, where the device waits
for it; exposed communication by axis; the optimizer; what grows with the number of devices; and what differs
between releases of a stack, of which only a range is known."""


@dataclass(frozen=True)
class Parts:
    """Times in ns by part; a part that is not there takes none."""

    times: Mapping[str, Estimate]
    __array_ufunc__ = None

    def __add__(self, other: "Parts") -> "Parts":
        found = dict(self.times)
        for part, time in other.times.items():
            found[part] = found[part] + time if part in found else time
        return Parts(found)

    def __mul__(self, factor: Number) -> "Parts":
        return Parts({part: time * factor for part, time in self.times.items()})

    __rmul__ = __mul__

    def total(self) -> Number:
        """What is expected of all parts together."""
        return sum((time.value for time in self.times.values()), start=np.float64(0.0))

    def end_by_end(self) -> Estimate:
        """All parts together, their ends added up: for comparing two things that run beside each other."""
        found = Estimate.exactly(0.0)
        for time in self.times.values():
            found = found + time
        return found

    def ranged(self) -> Estimate:
        """All parts together, their ranges added as squares."""
        value = self.total()
        below = sum(((time.value - time.low) ** 2 for time in self.times.values()), start=np.float64(0.0))
        above = sum(((time.high - time.value) ** 2 for time in self.times.values()), start=np.float64(0.0))
        return Estimate(value, value - np.sqrt(below), value + np.sqrt(above))


def exposed(running: Estimate, hidden_behind: Estimate) -> Estimate:
    """What is left of ``running`` beside ``hidden_behind``: most is left when the one is long and the other short."""
    return Estimate(
        np.maximum(0, running.value - hidden_behind.value),
        np.maximum(0, running.low - hidden_behind.high),
        np.maximum(0, running.high - hidden_behind.low),
    )
