"""Timing on one of several ranks that are all busy, as they are in training."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

WARM_UPS = 3
FEWEST, MOST = 5, 400
"""Samples of a point."""
SAMPLE_S = 1e-3
"""On a device, calls are timed in groups that take about this long: events are coarse."""


@dataclass(frozen=True)
class Bench:
    """A rank's part in the measuring. All ranks must measure the same points in the same order."""

    device: torch.device
    rank: int
    ranks: int
    seconds: float
    """Of each point."""

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Median seconds of ``call``, which has nothing to do with other ranks, while all ranks make such calls.

        The median leaves out what the system does at times: a few slow samples do not move it.
        """
        warm = time.perf_counter() + self.seconds
        for _ in range(WARM_UPS):
            call()
            if time.perf_counter() > warm:
                break
        size = self._sample_size(call)
        dist.barrier()
        samples: list[float] = []
        until = time.perf_counter() + self.seconds
        while len(samples) < FEWEST or (time.perf_counter() < until and len(samples) < MOST):
            samples.append(self._sample(call, size))
        dist.barrier()  # a rank that is done early must not leave the others the machine for their last samples
        return median(samples)

    def seconds_together(self, call: Callable[[], object]) -> float:
        """Median seconds of ``call``, in which all ranks take part: as often on each of them."""
        for _ in range(WARM_UPS):
            call()
        self.synchronise()
        dist.barrier()
        began = time.perf_counter()
        call()
        self.synchronise()
        wanted = min(max(int(self.seconds / max(time.perf_counter() - began, 1e-6)), FEWEST), MOST)
        count = self.agreed(wanted)
        dist.barrier()
        return median(self._sample(call, 1) for _ in range(count))

    def agreed(self, number: int) -> int:
        """The first rank's ``number``, on every rank."""
        told = [number]
        dist.broadcast_object_list(told, device=torch.device("cpu"))
        return told[0]

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _sample_size(self, call: Callable[[], object]) -> int:
        if self.device.type == "cpu":
            return 1
        return max(1, min(200, int(SAMPLE_S / max(self._sample(call, 3), 1e-7))))

    def _sample(self, call: Callable[[], object], size: int) -> float:
        """Seconds of one call, the mean of ``size``."""
        if self.device.type == "cpu":
            began = time.perf_counter()
            for _ in range(size):
                call()
            return (time.perf_counter() - began) / size
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(size):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / size
