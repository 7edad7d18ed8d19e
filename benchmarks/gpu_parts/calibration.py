"""What the device reaches: matrix products, attention and copies by shape; and a cluster file where Headway's own
calibration can run, which needs all of the package's requirements."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.device import seconds_of

BUDGET_S = 0.1
FLOAT8_FROM = (8, 9)


def shapes(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None]) -> None:
    """A row for each point."""
    _products(device, dry, add)
    _attention(device, dry, add)
    _copies(device, dry, add)


def cluster(dry: bool, add: Callable[[dict[str, Any]], None], cluster_file: Path) -> None:
    """Write the cluster file of Headway's calibration; a row says where it is or why there is none.

    It starts processes of its own, so that this one must not have used the device.
    """
    try:
        from headway.calibrate import QUICK, SHORT, calibrate
        from headway.cluster import cluster_toml
    except ImportError as error:
        add({"cluster_file": None, "reason": f"{error}: bring the requirements of headway on PYTHONPATH"})
        return
    found = calibrate(1, QUICK if dry else SHORT["cuda"])
    cluster_file.write_text(cluster_toml(found.cluster))
    add({"cluster_file": cluster_file.name})


def _products(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None]) -> None:
    sizes = (
        [(64, 64, 64)] if dry else [(8192, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 14336), (32_760, 5120, 5120)]
    )
    float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_FROM
    for precision in ("float32", "bfloat16", *(("float8",) if float8 else ())):
        for m, n, k in sizes:
            calls = [_product(device, precision, m, n, k) for _ in range(1 if dry else 2)]
            seconds = seconds_of(calls, device, BUDGET_S)
            work = 2.0 * m * n * k
            add({"kind": "product", "precision": precision, "shape": [m, n, k], "tflops": work / seconds / 1e12})


def _product(device: torch.device, precision: str, m: int, n: int, k: int) -> Callable[[], object]:
    if precision == "float8":
        one = torch.ones((), device=device)
        left, right = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
        return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    left, right = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
    return lambda: torch.mm(left, right.t())


def _attention(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None]) -> None:
    for length, size in [(64, 64)] if dry else [(4096, 128), (16_384, 128), (4096, 64)]:
        for causal in (False, True):
            query, key, value = (torch.randn(2, 8, length, size, device=device).bfloat16() for _ in range(3))
            call = partial(scaled_dot_product_attention, query, key, value, is_causal=causal)
            seconds = seconds_of([call], device, BUDGET_S)
            work = 4.0 * 2 * 8 * length * length * size * (0.5 if causal else 1.0)
            shape = {"kind": "attention", "keys": length, "head_size": size, "causal": causal}
            add(shape | {"tflops": work / seconds / 1e12})


def _copies(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None]) -> None:
    for size in [1 << 16] if dry else [1 << 26, 1 << 30]:
        here, there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        seconds = seconds_of([partial(there.copy_, here)], device, BUDGET_S)
        add({"kind": "copy on the device", "bytes": size, "gb_per_s": 2 * size / seconds / 1e9})
        if device.type == "cuda":
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            seconds = seconds_of([partial(here.copy_, host, non_blocking=True)], device, BUDGET_S)
            add({"kind": "copy to the device", "bytes": size, "gb_per_s": size / seconds / 1e9})
