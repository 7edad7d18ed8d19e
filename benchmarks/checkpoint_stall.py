"""How long training stands still for a checkpoint: ours, dcp.save and dcp.async_save, for the same sharded state.

The state is a model with AdamW moments, about 200 MB in all, on gloo ranks of this machine. The ways are interleaved in
one run; between saves every way is given the time to finish writing, and the disk what it needs to settle.
Run: python benchmarks/checkpoint_stall.py --json benchmarks/results/checkpoint_stall.json
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headway.parallel import FullyShardedModel, Masters
from headway.recipe import CheckpointRecipe, OptimRecipe
from headway.train.checkpoints import Checkpoints
from headway.train.optimizers import build_optimizers, optimizer_state

LAYERS, WIDTH, ROUNDS = 64, 512, 3


def sharded_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    masters = Masters(FullyShardedModel(model).parameters(), dist.get_world_size())
    optimizers = build_optimizers(masters, OptimRecipe())
    return {"model": dict(masters.whole), "optimizer": optimizer_state(masters, optimizers)}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure(folder: Path) -> dict[str, list[float]]:
    """Seconds of stall on this rank for each way; the first round, which allocates buffers, is left out."""
    state = sharded_state()
    group = dist.new_group(backend="gloo")
    failed: list[str] = []
    recipe = CheckpointRecipe(keep_last=1)
    checkpoints = Checkpoints(
        folder / "ours", recipe, lambda kind, fields: failed.append(fields["message"]) if "failed" in kind else None
    )
    stalls: dict[str, list[float]] = {"headway": [], "dcp.save": [], "dcp.async_save": []}
    for number in range(ROUNDS + 1):
        stalls["headway"].append(timed(lambda number=number: checkpoints.save(number, state))[0])
        checkpoints.finish()
        path = folder / f"save-{number}"
        stalls["dcp.save"].append(timed(lambda path=path: dcp.save(state, checkpoint_id=path, process_group=group))[0])
        path = folder / f"async-{number}"
        seconds, saving = timed(lambda path=path: dcp.async_save(state, checkpoint_id=path, process_group=group))
        stalls["dcp.async_save"].append(seconds)
        saving.result()
        dist.barrier()
        if dist.get_rank() == 0:
            for path in folder.glob("*-*"):
                shutil.rmtree(path)
    assert not failed, failed
    return {way: seconds[1:] for way, seconds in stalls.items()}


def rank_main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    (folder / f"result-{rank}.json").write_text(json.dumps(measure(folder)))
    dist.destroy_process_group()


def on_ranks(world: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=rank_main, args=(rank, world, folder)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]
    # A step can go on when the slowest rank can.
    rounds = {way: [max(each) for each in zip(*(result[way] for result in results), strict=True)] for way in results[0]}
    medians = {way: statistics.median(seconds) for way, seconds in rounds.items()}
    return {
        "ranks": world,
        "stall_s": rounds,
        "median_stall_s": medians,
        "times_headway": {way: seconds / medians["headway"] for way, seconds in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parameters = LAYERS * (WIDTH * WIDTH + WIDTH)
    report = {
        "benchmark": "checkpoint_stall",
        "torch": torch.__version__,
        "state_bytes": 3 * 4 * parameters,
        "results": [on_ranks(world) for world in (1, 2)],
    }
    for result in report["results"]:
        for way, seconds in result["median_stall_s"].items():
            print(f"{result['ranks']} ranks  {way:15} {1e3 * seconds:8.1f} ms  {result['times_headway'][way]:6.1f}x")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
