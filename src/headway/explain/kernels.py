"""Kernels that compute: how long they take, and of matrix products how near they come to the device's roofline."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headway.cluster import Accelerator, accelerator_of_device
from headway.explain.rank_view import RankView
from headway.timeline import Kind

MOST_NAMES = 64
"""Of one rank, the kernels that take longest."""
MOST_KERNELS = 25
"""Listed in a report."""


@dataclass(frozen=True)
class Products:
    """The matrix products of one kernel whose shapes a trace tells."""

    flops: int
    bytes: int
    """Factors and results, once each."""
    spent_ns: int
    dtype: str

    def __add__(self, other: "Products") -> "Products":
        return Products(self.flops + other.flops, self.bytes + other.bytes, self.spent_ns + other.spent_ns, self.dtype)


class HasKernels(Protocol):
    """What is listed of: a rank's part."""

    @property
    def kernel_ns(self) -> Mapping[str, tuple[int, int]]:
        """Number and total duration by name."""

    @property
    def products(self) -> Mapping[str, Products]:
        """By name, of kernels whose shapes are known."""

    @property
    def device_name(self) -> str:
        """As the driver reports it; "" where the trace does not say."""


def kernel_times(view: RankView) -> dict[str, tuple[int, int]]:
    """Number and total ns of the kernels that compute longest, by name."""
    timeline = view.timeline
    computes = np.flatnonzero(timeline.kinds(Kind.COMPUTE))
    names, where, counts = np.unique(timeline.name[computes], return_inverse=True, return_counts=True)
    spent = np.zeros(len(names), dtype=np.int64)
    np.add.at(spent, where, timeline.duration_ns[computes])
    most = np.argsort(-spent, kind="stable")[:MOST_NAMES].tolist()
    return {timeline.strings[int(names[at])]: (int(counts[at]), int(spent[at])) for at in most}


def product_times(view: RankView) -> dict[str, Products]:
    """The products whose shapes are known, by kernel; of a kernel of several types, those of the first."""
    timeline = view.timeline
    known = np.flatnonzero(timeline.kinds(Kind.COMPUTE) & (timeline.flops > 0))
    found: dict[str, Products] = {}
    keys = np.stack([timeline.name[known], timeline.dtype[known]])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    for number, (name, dtype) in enumerate(distinct.T.tolist()):
        here = known[which.ravel() == number]
        flops, moved, spent = (
            int(column[here].sum(dtype=np.float64)) for column in (timeline.flops, timeline.bytes, timeline.duration_ns)
        )
        found.setdefault(timeline.strings[name], Products(flops, moved, spent, timeline.strings[dtype]))
    return found


def device_name(facts: Mapping[str, Any]) -> str:
    """Of the first device that a trace tells of."""
    devices = facts.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else ""


def kernels_json(parts: Iterable[HasKernels]) -> list[dict[str, Any]]:
    """The kernels that compute longest, over all ranks: number, time, share of all that is listed, and rate.

    ``tflops_per_s`` is of the products whose shapes are known; ``roofline_tflops_per_s`` what their shapes allow on the
    device: its dense peak, or its bandwidth times FLOPs a byte. None where shapes or device are not known.
    """
    parts = list(parts)
    counts: dict[str, tuple[int, int]] = {}
    products: dict[str, Products] = {}
    for part in parts:
        for name, (count, spent) in part.kernel_ns.items():
            known = counts.get(name, (0, 0))
            counts[name] = (known[0] + count, known[1] + spent)
        for name, more in part.products.items():
            products[name] = products[name] + more if name in products else more
    devices = {part.device_name for part in parts}
    accelerator = accelerator_of_device(devices.pop()) if len(devices) == 1 else None
    total = sum(spent for _, spent in counts.values())
    most = sorted(counts.items(), key=lambda one: -one[1][1])[:MOST_KERNELS]
    return [
        {
            "name": name,
            "count": count,
            "total_us": spent / 1000,
            "share": spent / total if total else 0.0,
            **_rate(name, products.get(name), accelerator),
        }
        for name, (count, spent) in most
    ]


def _rate(name: str, known: Products | None, accelerator: Accelerator | None) -> dict[str, Any]:
    if known is None or not known.spent_ns:
        return {"dtype": None, "tflops_per_s": None, "roofline_tflops_per_s": None}
    limit = None
    if accelerator is not None and (peak := accelerator.peak_tflops(precision_of(name, known.dtype))) is not None:
        by_memory = accelerator.memory_bandwidth_gb_per_s * known.flops / known.bytes / 1000
        limit = min(peak, by_memory)
    return {
        "dtype": known.dtype,
        "tflops_per_s": known.flops / known.spent_ns / 1000,
        "roofline_tflops_per_s": limit,
    }


def precision_of(name: str, dtype: str) -> str:
    """What the catalogue calls the precision that a kernel multiplies in."""
    if dtype == "float32" and ("tf32" in name or "s1688" in name):
        return "tf32"
    return "float8" if dtype.startswith("float8") else dtype
