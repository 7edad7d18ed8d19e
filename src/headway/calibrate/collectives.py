"""Collectives and messages over the real backend by kind and size, and what they cost the compute beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.calibrate.bench import Bench
from headway.calibrate.effort import Effort
from headway.calibrate.fit import fitted, ranged, rounded

SIZES = (1, 4, 16, 64, 256, 4096)
"""The largest message over each that is measured."""
PASSES = {"all_reduce": 2.0, "broadcast": None, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Of the tensor, (n-1)/n of which crosses a link in each; broadcast: the tensor itself, and messages likewise."""
PRODUCT = 256
"""Rows of the products that are computed beside a collective."""


@dataclass(frozen=True)
class CollectiveTime:
    """Of a collective of a tensor of ``bytes``, counted as ``headway.cost.collective`` does."""

    kind: str
    ranks: int
    bytes: int
    seconds: float

    @property
    def crossing(self) -> float:
        """Bytes that a link carries one way."""
        passes = PASSES.get(self.kind)
        return self.bytes if passes is None else passes * self.bytes * (self.ranks - 1) / self.ranks


def measure_collectives(bench: Bench, effort: Effort) -> list[CollectiveTime]:
    """Every kind by size; nothing on a single rank."""
    if bench.ranks == 1:
        return []
    found = []
    for part in SIZES:
        size = max(effort.message_bytes // part, 4 * bench.ranks) // (4 * bench.ranks) * 4 * bench.ranks
        for kind, call in _calls(bench, size).items():
            seconds = bench.seconds_together(call)
            found.append(CollectiveTime(kind, bench.ranks, size, seconds / (2 if kind == "send_recv" else 1)))
    return found


def measure_slowdown(bench: Bench, effort: Effort) -> float | None:
    """By how much a product is slower while an all-reduce runs beside it; None on a single rank."""
    if bench.ranks == 1:
        return None
    x = torch.randn(PRODUCT, PRODUCT, device=bench.device)
    message = torch.ones(effort.message_bytes // 4, device=bench.device)
    talk = bench.seconds_together(lambda: dist.all_reduce(message.mul_(0.5)))
    product = bench.seconds_of(lambda: torch.mm(x, x))
    count = bench.agreed(max(1, int(1.5 * talk / product)))

    def beside() -> None:
        work = dist.all_reduce(message.mul_(0.5), async_op=True)
        for _ in range(count):
            torch.mm(x, x)
        work.wait()

    def alone() -> None:
        message.mul_(0.5)
        for _ in range(count):
            torch.mm(x, x)

    longer = bench.seconds_together(beside) - bench.seconds_together(alone)
    return max(longer, 0.0) / talk


def link_rates(times: list[CollectiveTime], source: str) -> tuple[float, dict[str, Any]]:
    """GB/s of the link, the fastest of what crossed it, and ``levels.achieved``: ``t = startup + crossing / rate`` by
    kind."""
    fastest = max(time.crossing / time.seconds / 1e9 for time in times)
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(time.kind for time in times):
        own = [time for time in times if time.kind == kind]
        seconds, crossing = [time.seconds for time in own], [time.crossing for time in own]
        per_byte, startup = fitted(crossing, seconds, [1.0] * len(own))
        modelled = [startup + per_byte * size for size in crossing]
        kinds[kind] = {
            "startup_us": rounded(1e6 * startup),
            "efficiency": ranged(1e-9 / per_byte / fastest, seconds, modelled),
        }
    reduces, exchanges = kinds["all_reduce"], kinds["all_to_all"]
    return rounded(fastest), {
        "startup_us": reduces["startup_us"],
        "hop_us": 0.0,
        "ramp_us": 0.0,
        "ramp_megabytes": 1.0,
        "efficiency": reduces["efficiency"],
        "few_ranks": 0.0,
        "all_to_all_startup_us": exchanges["startup_us"],
        "all_to_all_efficiency": exchanges["efficiency"],
        "kinds": kinds,
        "source": source,
    }


def _calls(bench: Bench, size: int) -> dict[str, Callable[[], object]]:
    """By kind, on tensors of ``size`` bytes."""
    whole = torch.zeros(size // 4, device=bench.device)
    other, part = torch.empty_like(whole), torch.zeros(whole.numel() // bench.ranks, device=bench.device)
    peer = bench.rank ^ 1
    group = dist.group.WORLD  # asked itself: the names of these two in torch.distributed differ between releases
    assert group is not None
    scattering = dist.ReduceScatterOptions()

    def there_and_back() -> None:
        if peer < bench.ranks:
            for sends in (bench.rank % 2 == 0, bench.rank % 2 == 1):
                dist.send(whole, peer) if sends else dist.recv(whole, peer)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: group._allgather_base(whole, part).wait(),
        "reduce_scatter": lambda: group._reduce_scatter_base(part, whole, scattering).wait(),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": there_and_back,
    }
