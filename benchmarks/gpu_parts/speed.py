"""Time of every operator, forward and backward: ours, PyTorch's, compiled, Liger's, beside what memory allows."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_parts.device import facts, seconds_of
from gpu_parts.workloads import Workload, workloads
from headway.kernels import OPERATORS

SETS = 3
"""Of inputs, each as large as all caches, so that none of them is in one when its turn comes."""
BUDGET_S = 0.15
"""Of each point."""


def run(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None]) -> None:
    """A row for each operator, size, direction and way; and one for operators that no workload times."""
    bandwidth = facts(device)["memory_bandwidth_gb_per_s"]
    timed = set()
    for workload in workloads(device, dry):
        timed.add(workload.operator)
        for direction, way, seconds in _times(workload, device, dry):
            moved = workload.forward_bytes if direction == "forward" else workload.backward_bytes
            row: dict[str, Any] = {
                "operator": workload.operator,
                "workload": workload.name,
                "direction": direction,
                "way": way,
            }
            if isinstance(seconds, str):
                add(row | {"error": seconds})
                continue
            row |= {"seconds": seconds, "gb_per_s": (moved or 0) / seconds / 1e9}
            if bandwidth is not None:
                floor = (moved or 0) / (bandwidth * 1e9)
                row |= {"floor_s": floor, "share_of_floor": floor / seconds, "valid": seconds >= floor}
            add(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    add({"without_workload": sorted(OPERATORS.keys() - timed)})


def _times(workload: Workload, device: torch.device, dry: bool) -> Iterator[tuple[str, str, float | str]]:
    """Direction, way, and seconds or why there are none."""
    sets = [workload.inputs() for _ in range(1 if dry else SETS)]
    ways = dict(workload.ways)
    if workload.compiled and not dry:
        ways["compiled"] = torch.compile(workload.ways["eager"], dynamic=False)
    for name, way in ways.items():
        try:
            yield "forward", name, seconds_of([_forward(way, given) for given in sets], device, BUDGET_S)
            if workload.backward_bytes is not None:
                yield "backward", name, seconds_of([_backward(way, given) for given in sets], device, BUDGET_S)
        except Exception as error:  # a way that does not run here is told of, and the others are timed
            yield "forward", name, f"{type(error).__name__}: {error}"[:300]


def _forward(way: Callable[..., Any], given: tuple[Any, ...]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return way(*given)

    return call


def _backward(way: Callable[..., Any], given: tuple[Tensor, ...]) -> Callable[[], object]:
    results = way(*given)
    outputs = results if isinstance(results, tuple) else (results,)
    upstream = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, given, upstream, retain_graph=True)
