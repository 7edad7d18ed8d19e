"""What a step took: times in integer nanoseconds, rates, and the peak of memory."""

import contextlib
import ctypes
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class StepTimes:
    """What the steps since the last reading took, and how much they trained on."""

    steps: int
    elapsed_ns: int
    data_wait_ns: int
    samples: int
    tokens: int

    @property
    def step_time_s(self) -> float:
        """Mean seconds of a step, waiting for data included."""
        return self.elapsed_ns / self.steps / 1e9

    @property
    def data_wait_s(self) -> float:
        """Mean seconds that a step waited for its data."""
        return self.data_wait_ns / self.steps / 1e9

    @property
    def samples_per_s(self) -> float:
        """Samples a second, counted as ``StepTimer.step_done`` was told."""
        return self.samples * 1e9 / self.elapsed_ns

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, counted as ``StepTimer.step_done`` was told."""
        return self.tokens * 1e9 / self.elapsed_ns


class StepTimer:
    """Times steps on the monotonic clock of the host.

    A step lasts from the end of the step before (or ``start``) to its own end, so that nothing falls between two
    steps; what runs ``outside`` (validation, sampling, a stall reported on its own) is taken out exactly.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin the first step now, and forget what was measured."""
        self._began_ns = time.monotonic_ns()
        self._outside_ns = 0
        self._data_wait_ns = 0
        self._steps = 0
        self._samples = 0
        self._tokens = 0

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._data_wait_ns += time.monotonic_ns() - began

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Keep the time inside out of all steps."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._outside_ns += time.monotonic_ns() - began

    def step_done(self, samples: int, tokens: int = 0) -> None:
        """End a step that trained on ``samples`` samples and ``tokens`` tokens."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def read(self) -> StepTimes:
        """The steps since the last reading; call it right after ``step_done``. Raises ValueError without a step."""
        if self._steps == 0:
            raise ValueError("no step has ended since the last reading")
        elapsed = max(time.monotonic_ns() - self._began_ns - self._outside_ns, 1)
        times = StepTimes(self._steps, elapsed, self._data_wait_ns, self._samples, self._tokens)
        self.start()
        return times


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak GiB of this process: allocated by torch on CUDA, resident on the CPU (since ``forget_peak_memory``)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def forget_peak_memory() -> None:
    """Begin the peak of what is resident anew, where Linux lets a process do so, with what is freed given back."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


_RESET_PEAK = "5"
"""See proc(5)."""
