"""Real gloo ranks for tests: processes forked from the test process, which has already paid for the imports."""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

fork = multiprocessing.get_context("fork")


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run ``function(*arguments)`` on ``world`` ranks with a gloo process group and return each rank's result in order.

    Raises AssertionError with the traces of all ranks that failed; a rank that hangs says where, and is ended after
    ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            fork.Process(target=_rank_main, args=(rank, world, folder, function, arguments, timeout_s), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        errors = [
            f"rank {rank}: {Path(folder, f'error-{rank}').read_text()}"
            for rank in range(world)
            if Path(folder, f"error-{rank}").exists()
        ]
        stacks = [f"rank {r}: hung for {timeout_s} s: {Path(folder, f'stacks-{r}').read_text()}" for r in hung]
        if errors or stacks:
            raise AssertionError("\n".join([*errors, *stacks]))
        crashed = [f"rank {r}: exit code {p.exitcode}" for r, p in enumerate(processes) if p.exitcode != 0]
        assert not crashed, "\n".join(crashed)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]


def _rank_main(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
) -> None:
    stacks = Path(folder, f"stacks-{rank}").open("w")  # noqa: SIM115  (the process ends with it open)
    faulthandler.dump_traceback_later(0.95 * timeout_s, file=stacks)
    try:
        torch.set_num_threads(1)
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        store = dist.FileStore(str(Path(folder, "store")), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        dist.barrier()  # a rank that is done at once would leave others, which are still connecting, without a peer
        result = function(*arguments)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
