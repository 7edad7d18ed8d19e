"""What two moving averages cost beside the optimizer step they follow: ours and torch.optim.swa_utils.AveragedModel.

AveragedModel keeps one average of a deep copy of the model; two of them are updated here, with its own multi-tensor
function. The same sharded model (one rank), interleaved in one run, medians.
Run: python benchmarks/ema_step.py --json benchmarks/results/ema_step.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from headway.parallel import FullyShardedModel, Masters
from headway.recipe import EmaRecipe, OptimRecipe
from headway.train.ema import Ema
from headway.train.optimizers import build_optimizers

DECAYS = [0.99, 0.9999]
ROUNDS = 25


def plain_model(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def sharded_model(width: int, layers: int) -> nn.Sequential:
    model = plain_model(width, layers)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def averaged_models(model: nn.Module) -> list[AveragedModel]:
    return [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) for decay in DECAYS]


def measure(width: int, layers: int) -> dict[str, Any]:
    """Seconds for each of: optimizer step, our update, AveragedModel on the sharded model and on the plain one."""
    model, plain = sharded_model(width, layers), plain_model(width, layers)
    laid_out = FullyShardedModel(model)
    masters = Masters(laid_out.parameters(), 1)
    for shard in masters.local.values():
        shard.grad = torch.ones_like(shard)
    optimizer = build_optimizers(masters, OptimRecipe())[0]
    ema = Ema(masters, laid_out, EmaRecipe(decays=DECAYS, warmup=False))
    works: dict[str, Callable[[], Any]] = {
        "optimizer_step": optimizer.step,
        "headway": lambda: ema.update(0),
    }
    failures = {}
    for name, averaged in {"averaged_model_sharded": model, "averaged_model_plain": plain}.items():
        try:
            others = averaged_models(averaged)
            for other in others * 2:  # the first update only copies
                other.update_parameters(averaged)
            works[name] = lambda others=others, averaged=averaged: [o.update_parameters(averaged) for o in others]
        except Exception as error:  # a library that can't run this layout: the table says so
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values[3:]) for name, values in seconds.items()}
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "tensors": 2 * layers,
        "median_s": medians,
        "times_headway": {name: value / medians["headway"] for name, value in medians.items()},
        "cannot_run": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        results = [measure(width, layers) for width, layers in ((128, 50), (1024, 12))]
        dist.destroy_process_group()
    for result in results:
        for name, seconds in result["median_s"].items():
            ratio = result["times_headway"][name]
            print(f"{result['parameters']:>11,} parameters  {name:24} {1e3 * seconds:8.2f} ms  {ratio:5.2f}x")
        for name, why in result["cannot_run"].items():
            print(f"{result['parameters']:>11,} parameters  {name:24} can't run: {why}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"benchmark": "ema_step", "torch": torch.__version__, "decays": DECAYS, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
