"""Matrix products by shape and precision."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.calibrate.bench import Bench
from headway.calibrate.effort import Effort
from headway.calibrate.fit import fitted, ranged, rounded
from headway.parallel import emulate_bfloat16_products, has_bfloat16_instructions

FLOAT8_FROM = (8, 9)
"""Compute capability from which a CUDA device multiplies float8."""
SHAPES = (
    (1, 1, 1), (2, 2, 2), (4, 4, 4), (1, 4, 4), (1, 4, 1), (1, 1, 4),
    (2, 4, 16), (2, 16, 4), (1, 8, 8), (4, 8, 8), (1, 16, 16), (4, 16, 16),
)  # fmt: skip
"""The largest size over m, n and k."""


@dataclass(frozen=True)
class ProductTime:
    """Of a product of ``[m, k]`` and ``[k, n]``."""

    precision: str
    m: int
    n: int
    k: int
    seconds: float
    call: float
    """Of them, the call of an operator: the host's; 0 on a device."""


def precisions(device: torch.device) -> tuple[str, ...]:
    """That a device multiplies in."""
    if device.type == "cpu":
        return ("float32", "bfloat16")
    float8 = ("float8",) if torch.cuda.get_device_capability(device) >= FLOAT8_FROM else ()
    return ("float32", "tf32", "bfloat16", *float8)


def measure_products(bench: Bench, effort: Effort) -> list[ProductTime]:
    """The products of a linear layer: forward, and the gradients of its input and of its weight."""
    if bench.device.type == "cpu" and not has_bfloat16_instructions():
        emulate_bfloat16_products()  # as training does
    found = []
    for precision in precisions(bench.device):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        nothing = bench.seconds_of(_call(bench.device, precision, 4, 4, 4)) if bench.device.type == "cpu" else 0.0
        for m, n, k in _shapes(effort):
            seconds = bench.seconds_of(_call(bench.device, precision, m, n, k))
            found.append(ProductTime(precision, m, n, k, seconds, min(nothing, seconds)))
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def product_rates(
    times: list[ProductTime], peaks: dict[str, float], source: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """``achieved.matrix`` of a cluster, and dense peaks in TFLOP/s: those of ``peaks``, else the fastest measured.

    ``t = flops / (peak · e) + (k0 / (peak · e)) · flops / k`` is linear in ``1 / e`` and ``k0 / e``.
    """
    rates, reached = {}, {}
    known = dict.fromkeys(time.precision for time in times)
    whole_calls = {precision: max(time.call for time in times if time.precision == precision) for precision in known}
    for precision in known:
        own = [time for time in times if time.precision == precision]
        seconds = [time.seconds for time in own]
        flops = [2.0 * time.m * time.n * time.k for time in own]
        shallow = [2.0 * time.m * time.n for time in own]
        calls = [time.call for time in own]
        per_flop, per_shallow = fitted(flops, seconds, shallow, calls)
        fastest = max(some / time for some, time in zip(flops, seconds, strict=True)) / 1e12
        reached[precision] = peaks.get(precision, rounded(max(fastest, 1e-12 / per_flop)))
        modelled = [
            call + per_flop * some + per_shallow * other
            for call, some, other in zip(calls, flops, shallow, strict=True)
        ]
        efficiency = 1 / (per_flop * reached[precision] * 1e12)
        rates[precision] = {
            "efficiency": ranged(efficiency, seconds, modelled),
            "half_depth": rounded(per_shallow / per_flop),
            "call_us": rounded(1e6 * (whole_calls[precision] - min(whole_calls.values()))),
            "source": source,
        }
    return rates, reached


def _shapes(effort: Effort) -> Iterator[tuple[int, int, int]]:
    largest = effort.largest_product
    for shape in SHAPES:
        m, n, k = (largest // part for part in shape)
        yield m, n, k


def _call(device: torch.device, precision: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """As a linear layer's forward pass: the weight lies ``[n, k]``. Values are random: zeros take less power."""
    if precision == "float8":
        scale = torch.ones((), device=device)
        left, right = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
        return lambda: torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    inputs, weight = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
    return lambda: torch.mm(inputs, weight.t())
