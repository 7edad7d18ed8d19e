"""All that is measured, on as many ranks as train on this machine, at once: one process each."""

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from headway.calibrate.attention import AttentionTime, measure_attention
from headway.calibrate.bench import Bench
from headway.calibrate.collectives import CollectiveTime, measure_collectives, measure_slowdown
from headway.calibrate.effort import Effort
from headway.calibrate.host import HostTime, import_models, last_level_cache_bytes, measure_host
from headway.calibrate.memory import MemoryTime, measure_memory
from headway.calibrate.products import ProductTime, measure_products
from headway.train.throughput import peak_memory_gib

TIMEOUT_S = 300
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Device:
    """What a rank computes on, as the system names it."""

    type: str
    name: str
    processors: int
    """Threads of a rank on the CPU, multiprocessors of a GPU."""
    memory_bytes: int
    cache_bytes: int
    """A rank's share of the processor's last-level cache; 0 on a GPU, or when it is not known."""


@dataclass(frozen=True)
class Measurement:
    """Times are the mean of all ranks'."""

    ranks: int
    device: Device
    products: list[ProductTime]
    attention: list[AttentionTime]
    memory: list[MemoryTime]
    collectives: list[CollectiveTime]
    slowdown: float | None
    host: list[HostTime]


def measure(ranks: int, effort: Effort) -> Measurement:
    """Start ``ranks`` processes that measure, and wait for them.

    This process must have no process group and, on the CPU, no threads; it goes on with one. Raises the
    torch.multiprocessing error of the first that fails.
    """
    torch.set_num_threads(1)  # threads of this process would be missing in its children
    with tempfile.TemporaryDirectory(prefix="headway-calibrate-") as folder:
        import_models()  # once, for all ranks that are forked
        imported = peak_memory_gib(CPU)
        method = "fork" if device_type() == "cpu" else "spawn"
        torch.multiprocessing.start_processes(_rank_main, (ranks, folder, effort, imported), ranks, start_method=method)
        told = [json.loads(Path(folder, f"rank-{rank}").read_text()) for rank in range(ranks)]
    return Measurement(
        ranks=ranks,
        device=Device(**told[0]["device"]),
        products=_mean(told, "products", ProductTime),
        attention=_mean(told, "attention", AttentionTime),
        memory=_mean(told, "memory", MemoryTime),
        collectives=_mean(told, "collectives", CollectiveTime),
        slowdown=None if ranks == 1 else mean(own["slowdown"] for own in told),
        host=_mean(told, "host", HostTime),
    )


def _mean(told: list[dict[str, Any]], what: str, kind: type) -> list[Any]:
    """The points of the first rank with the mean of all ranks' seconds."""
    each = zip(*(own[what] for own in told), strict=True)
    return [kind(**same[0] | {"seconds": mean(point["seconds"] for point in same)}) for same in each]


def device_type() -> str:
    """What this machine trains on. CUDA is not initialised by it."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def usual_ranks() -> int:
    """As many as there are devices; on the CPU as cores."""
    return torch.cuda.device_count() or os.cpu_count() or 1


# In the processes


def _rank_main(rank: int, ranks: int, folder: str, effort: Effort, imported_gib: float | None) -> None:
    forked_gib = peak_memory_gib(CPU)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo must not depend on how the host's name resolves
    device = torch.device(device_type(), rank) if device_type() == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # As the ranks of ``headway train`` have them.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // ranks))))
    torch.manual_seed(rank)
    own = dist.FileStore(str(Path(folder, f"alone-{rank}")), 1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=own, rank=0, world_size=1)
    _meet(Path(folder), ranks)
    host = measure_host(device)  # first: later the peak of memory is that of what is measured
    if device.type == "cpu" and imported_gib and forked_gib:
        # Of what its parent had read of libraries' files a forked process counts only what it touches again.
        host = [replace(time, process_gib=time.process_gib + imported_gib - forked_gib) for time in host]
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))
    bench = Bench(device, rank, ranks, effort.seconds)
    with torch.no_grad():
        found: dict[str, list[Any]] = {
            "products": measure_products(bench, effort),
            "memory": measure_memory(bench, effort),
        }
    found |= {"attention": measure_attention(bench, effort), "collectives": measure_collectives(bench, effort)}
    slowdown = measure_slowdown(bench, effort)
    dist.destroy_process_group()
    points = {name: [asdict(point) for point in some] for name, some in (found | {"host": host}).items()}
    told = points | {"slowdown": slowdown, "device": asdict(_device(device, ranks))}
    Path(folder, f"rank-{rank}").write_text(json.dumps(told))


def _meet(folder: Path, ranks: int) -> None:
    """Wait until all ranks are here, without a process group."""
    store = dist.FileStore(str(folder / "meeting"), ranks)
    store.add("here", 1)
    deadline = time.monotonic() + TIMEOUT_S
    while int(store.add("here", 0)) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)


def _device(device: torch.device, ranks: int) -> Device:
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        return Device("cuda", known.name, known.multi_processor_count, known.total_memory, 0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", _processor(), torch.get_num_threads(), memory // ranks, last_level_cache_bytes() // ranks)


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"
