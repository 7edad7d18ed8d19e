"""Memory: its bandwidth, what each kind of memory-bound operator reaches of it, and copies to a device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.calibrate.bench import Bench
from headway.calibrate.effort import Effort
from headway.calibrate.fit import spread

aten = torch.ops.aten
WIDTH = 256
"""Elements of a row: what norms and softmax go over."""
TENSORS = 16
"""That an optimizer's call steps on."""
ADAMW_BYTES = 28
"""Per float32 parameter: parameter, gradient and two states read, all but the gradient written."""
BANDWIDTH = "bandwidth"
COPY = "host copy"
"""Kinds of times beside those of operators."""


@dataclass(frozen=True)
class MemoryTime:
    """Of a call that moves ``bytes``, the call of an operator left out."""

    kind: str
    name: str
    bytes: int
    cached: bool
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes a second, reads and writes together."""
        return self.bytes / self.seconds / 1e9


def measure_memory(bench: Bench, effort: Effort) -> list[MemoryTime]:
    """Bandwidth and operators on tensors that no cache holds, then operators on such as the last-level cache holds."""
    found = []
    nothing = 0.0
    if bench.device.type == "cpu":
        one = torch.zeros(1)
        nothing = bench.seconds_of(lambda: torch.add(one, one))
    for size in (effort.memory_bytes, effort.cached_bytes):
        if size == 0:
            continue
        cached = size == effort.cached_bytes
        tensor = torch.randn(size // 4 // WIDTH, WIDTH, device=bench.device)
        for kind, name, moved, call in _calls(tensor):
            if cached and kind == BANDWIDTH:
                continue
            seconds = bench.seconds_of(call)
            found.append(MemoryTime(kind, name, moved, cached, max(seconds - nothing, 0.2 * seconds)))
    return found + (_host_copies(bench, effort) if bench.device.type == "cuda" else [])


def memory_rates(times: list[MemoryTime], bandwidth: float, cache_bytes: int, source: str) -> dict[str, Any]:
    """``achieved.memory``: fractions of ``bandwidth`` (GB/s) by kind, in memory and in the cache.

    ``cache_bytes``: of a rank's share of the last-level cache; 0: none was measured.
    """
    rates: dict[str, Any] = {"fraction": _fractions([t for t in times if not t.cached], bandwidth), "source": source}
    if cache_bytes:
        cached = _fractions([time for time in times if time.cached], bandwidth)
        rates["cache"] = {"megabytes": cache_bytes / 1e6, "fraction": cached}
    return rates


def bandwidth_of(times: list[MemoryTime]) -> float:
    """GB/s of the fastest of reading, writing and copying."""
    return max(time.gb_per_s for time in times if time.kind == BANDWIDTH)


def _fractions(times: list[MemoryTime], bandwidth: float) -> dict[str, list[float]]:
    by_kind: dict[str, list[float]] = {}
    for time in times:
        if time.kind not in (BANDWIDTH, COPY):
            by_kind.setdefault(time.kind, []).append(time.gb_per_s / bandwidth)
    return {kind: spread(fractions) for kind, fractions in by_kind.items()}


def _calls(x: Tensor) -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Kind, name, bytes moved and call: as training calls them, the result being new memory each time."""
    size, rows = x.numel() * 4, x.shape[0]
    y, weight = torch.randn_like(x), torch.randn(WIDTH, device=x.device)
    yield BANDWIDTH, "read", size, lambda: x.sum()
    yield BANDWIDTH, "write", size, lambda: y.fill_(1.0)
    yield BANDWIDTH, "copy", 2 * size, lambda: y.copy_(x)
    yield "pointwise", "add", 3 * size, lambda: x + y
    yield "pointwise", "scale", 2 * size, lambda: x * 0.5
    narrow = x.bfloat16()
    for z, name, bytes_ in ((x, "", size), (narrow, " of bfloat16", size // 2)):
        yield "activation", f"silu{name}", 2 * bytes_, partial(aten.silu, z)
        yield "activation", f"gelu{name}", 2 * bytes_, partial(aten.gelu, z, approximate="tanh")
        yield "activation", f"gelu backward{name}", 3 * bytes_, partial(aten.gelu_backward, z, z, approximate="tanh")
    normalised = lambda: aten.native_layer_norm(x, [WIDTH], weight, weight, 1e-5)  # noqa: E731
    _, mean, deviation = normalised()
    yield "normalisation", "layer norm", 2 * size, normalised
    yield (
        "normalisation",
        "layer norm backward",
        3 * size,
        lambda: aten.native_layer_norm_backward(y, x, [WIDTH], mean, deviation, weight, weight, [True, True, True]),
    )
    yield "softmax", "log softmax", 2 * size, lambda: aten._log_softmax(x, -1, False)
    yield "softmax", "log softmax backward", 3 * size, lambda: aten._log_softmax_backward_data(y, x, -1, x.dtype)
    yield "cast", "to bfloat16", size * 3 // 2, lambda: x.bfloat16()
    yield "cast", "to float32", size * 3 // 2, lambda: narrow.float()
    heads = x.view(rows // 16, 16, WIDTH // 16, 16).transpose(1, 2)
    yield "permute", "heads", 2 * size, lambda: heads.contiguous()
    halves = x.chunk(2, -1)
    yield "permute", "concatenate", 2 * size, lambda: torch.cat(halves, -1)
    yield "permute", "clone", 2 * size, lambda: x.clone()
    yield "optimizer", "AdamW", ADAMW_BYTES * x.numel(), _adamw(x)


def _adamw(x: Tensor) -> Callable[[], object]:
    parameters, gradients, first = ([torch.randn_like(part) for part in x.chunk(TENSORS)] for _ in range(3))
    second = [part.square() for part in first]
    steps = [torch.ones((), device=x.device) for _ in parameters]

    def step() -> None:
        aten._fused_adamw_(
            parameters, gradients, first, second, [], steps,
            lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def _host_copies(bench: Bench, effort: Effort) -> list[MemoryTime]:
    size = effort.memory_bytes // 4
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=bench.device)
    return [
        MemoryTime(COPY, "to the device", size, False, bench.seconds_of(lambda: device.copy_(host, non_blocking=True))),
        MemoryTime(COPY, "to the host", size, False, bench.seconds_of(lambda: host.copy_(device, non_blocking=True))),
    ]
