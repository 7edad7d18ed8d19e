"""The device of the benchmark: what it is, its published peaks, and the time of calls on it."""

import platform
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

CATALOGUE = Path(__file__).parents[2] / "src" / "headway" / "cluster" / "catalogue.toml"
LIBRARIES = ("torch", "triton", "transformers", "diffusers", "torchao", "liger-kernel", "numpy")
DRY = torch.device("cpu")


def facts(device: torch.device) -> dict[str, Any]:
    """Name, versions, and published peaks of the device (None where the catalogue does not have it)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    known = published(name)
    return {
        "device": name,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {library: _version(library) for library in LIBRARIES},
        "memory_bandwidth_gb_per_s": known.get("memory_bandwidth_gb_per_s"),
        "dense_peak_tflops": known.get("dense_peak_tflops"),
    }


def published(name: str) -> dict[str, Any]:
    """What the catalogue says of a device with such a name; nothing if it is not there.

    The file is read as it is: the room that checks it needs pydantic, which a GPU machine may lack.
    """
    entries = tomllib.loads(CATALOGUE.read_text())["accelerator"]
    return next((each for each in entries if name in each.get("device_names", ())), {})


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device, budget_s: float) -> float:
    """Median seconds of a call; ``calls`` do the same on inputs of their own, so that no cache holds the next one's.

    On a GPU calls are queued without waiting, and events tell when each began and ended.
    """
    for call in calls:
        call()
    if device.type == "cpu":
        return median(_clocked(call) for call in calls)
    torch.cuda.synchronize()
    one = max(_clocked(partial(_and_wait, calls[0])), 1e-6)
    count = min(200, max(5, int(budget_s / one)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for number in range(count):
        calls[number % len(calls)]()
        events[number + 1].record()
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in pairwise(events)) / 1e3


def _and_wait(call: Callable[[], object]) -> None:
    call()
    torch.cuda.synchronize()


def _clocked(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
