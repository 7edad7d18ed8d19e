"""The process group of a run: one rank or many, on CPU (gloo) or CUDA (NCCL with gloo beside it)."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from headway.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0


@contextmanager
def start_ranks(device: str = "auto", timeout_s: int = 600) -> Iterator[Ranks]:
    """Join the process group that torchrun describes in the environment, or make one of a single rank.

    A group exists in either case: sharding, checkpoints and votes then have one code path. Raises UserError for a
    device that this machine does not have.
    """
    chosen = _device(device)
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        if chosen.type == "cpu" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # All ranks are on this host: gloo must not depend on how the host's name resolves.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, timeout=timeout, device_id=chosen if chosen.type == "cuda" else None)
        yield from _until_done(chosen)
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = dist.FileStore(str(Path(folder, "store")), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
            yield from _until_done(chosen)


def _until_done(device: torch.device) -> Iterator[Ranks]:
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('run.device = "cuda", but PyTorch sees no CUDA device here; use "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
