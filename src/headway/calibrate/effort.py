"""How long and how large a calibration measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Sizes are of the largest thing measured; smaller ones are fractions of it."""

    seconds: float
    """Of each point, warm-up not counted."""
    largest_product: int
    """Rows of the largest matrix product."""
    longest_sequence: int
    """But for one that is longer still and tells what a causal mask spares."""
    memory_bytes: int
    """Of a tensor that no cache holds; on the CPU below the 32 MiB from which glibc takes pages from the system, and
    gives them back, at each call: the page faults take longer than the operator, and few tensors are as large."""
    cached_bytes: int
    """Of a tensor that the last-level cache holds for each rank; 0: nothing is measured in caches."""
    message_bytes: int
    """Of the largest collective."""


FULL = {
    "cpu": Effort(0.12, 1024, 512, 24 << 20, 2 << 20, 16 << 20),
    "cuda": Effort(0.20, 16384, 4096, 1 << 30, 0, 1 << 30),
}
"""By type of device."""
SHORT = {
    "cpu": Effort(0.03, 512, 256, 24 << 20, 2 << 20, 8 << 20),
    "cuda": Effort(0.05, 8192, 2048, 256 << 20, 0, 256 << 20),
}
"""Half of the time and less, ranges a little wider."""
QUICK = Effort(0.005, 128, 64, 4 << 20, 1 << 18, 1 << 20)
"""For a look at whether it works: the numbers are rough."""
