"""The ranks that share one sequence: a ring of all-to-all groups."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

RING, ULYSSES = "cp_ring", "cp_ulysses"


@dataclass(frozen=True)
class ContextRanks:
    """This rank's place among those that share a sequence.

    Keys and values go round the ring; within an all-to-all group (Ulysses) sequence is exchanged for heads. Either may
    have one rank only.
    """

    ring: dist.ProcessGroup
    ulysses: dist.ProcessGroup

    @classmethod
    def of(cls, cp: DeviceMesh) -> "ContextRanks":
        """From a mesh with dimensions ("cp_ring", "cp_ulysses"), the second of neighbouring ranks."""
        return cls(cp[RING].get_group(), cp[ULYSSES].get_group())

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ring.size() * self.ulysses.size()

    @property
    def place(self) -> int:
        """Which of them this rank is: ring parts in order, in each the ranks of its all-to-all group."""
        return self.ring.rank() * self.ulysses.size() + self.ulysses.rank()
