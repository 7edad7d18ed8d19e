"""What a rank had allocated when, from the notes that PyTorch's profiler makes of each allocation and release."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.timeline.trace_events import EventColumns

MEMORY_INSTANT = "[memory]"
MEMORY_INTEGERS = ("Total Allocated", "Device Type", "Device Id")
_CPU = 0
"""Device type of c10's enumeration; every other one is an accelerator's."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes that one device's allocator has given out, at each change; columns of one length, in order of time."""

    at_ns: Integers
    allocated: Integers
    on_host: bool
    """It is the memory of a CPU, of which the profiler counts from when it began."""

    @staticmethod
    def nothing() -> "Memory":
        """Of a trace in which memory was not watched."""
        return Memory(np.zeros(0, np.int64), np.zeros(0, np.int64), on_host=True)

    def __len__(self) -> int:
        return len(self.at_ns)


def memory_of(events: EventColumns) -> Memory:
    """The memory of the accelerator that was used most, or of the host where there is none."""
    if not events.instants:
        return Memory.nothing()
    at, allocated, device, number = np.array(events.instants, dtype=np.int64).T
    on_host = not (device > _CPU).any()
    chosen = (device == _CPU) if on_host else (device > _CPU)
    if not on_host:
        numbers, counts = np.unique(number[chosen], return_counts=True)
        chosen &= number == numbers[counts.argmax()]
    chosen &= allocated >= 0
    order = np.flatnonzero(chosen)[np.argsort(at[chosen], kind="stable")]
    return Memory(at[order], allocated[order], on_host)
