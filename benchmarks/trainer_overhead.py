"""What Headway's Trainer costs beside a hand-written PyTorch loop, Accelerate and Lightning.

Same initial weights, micro-batches (collated beforehand), AdamW, schedule, clipping and averages. All loops live in
the same processes and take turns of two steps in changing order, so that noise of the machine meets all of them. A step
lasts as long as on its slowest rank. Ratios to the raw loop are taken within each round; shown are their median with
its 95 % interval (bootstrap over rounds), and the ratio of the fastest steps, which other programs disturb least. In
float32 the loops' losses are compared, step by step: a loop that skips work would not train alike.

raw_fully_shard is the hand-written loop with FSDP2 over its one rank. What a trainer costs beside the model does not
grow with the batch, so micro-batches are smaller than a real run's: a quarter of the demo's pictures, one sequence.
Run: python benchmarks/trainer_overhead.py --json benchmarks/results/trainer_overhead.json
"""

import argparse
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import lightning
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from headway.data import Batch
from headway.parallel import Ranks, start_ranks
from headway.recipe import Recipe, load_recipe, parse_recipe
from headway.runs.stop import StopSignals
from headway.train import Assembly, Trainer, assemble, training_loader
from loops.accelerate_loop import AccelerateLoop
from loops.lightning_loop import LightningLoop
from loops.raw import RawLoop
from loops.task import new_task

TURN = 2
WARM_UP_ROUNDS = 2
ACCUMULATION = 2
DISTINCT_STEPS = 6
LOSS_TOLERANCE = 1e-4
STEPS_COMPARED = 24
DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


@dataclass(frozen=True)
class Case:
    """A model in a precision on some ranks."""

    model: str
    precision: str
    ranks: int


def image_recipe(folder: Path, precision: str, ranks: int) -> Recipe:
    """The Stable Diffusion 3 transformer of the demo."""
    return load_recipe(
        DEMO,
        [
            f"precision.compute={precision}",
            f"run.directory={folder}",
            "run.micro_batch=8",
            f"run.global_batch={8 * ranks * ACCUMULATION}",
            "run.device=cpu",
            "optim.kind=adamw",
            "optim.warmup_steps=0",
            "run.steps=900",
            "sample.prompts=[]",
        ],
    )


def text_recipe(folder: Path, precision: str, ranks: int) -> Recipe:
    """A Qwen3 of width 256 with 4 blocks on sequences of 256 bytes, in each of which every label counts."""
    words = np.random.default_rng(0).integers(97, 123, 200_000, dtype=np.uint8).tobytes().decode()
    text = folder / "text.jsonl"
    if not text.exists():
        text.write_text(json.dumps({"text": words}) + "\n")
    document = {
        "model": {
            "class_name": "Qwen3ForCausalLM",
            "tokenizer": "bytes",
            "config": {
                "vocab_size": 512,
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "tie_word_embeddings": False,
            },
        },
        "objective": {"kind": "next_token"},
        "data": {"kind": "jsonl_text", "path": str(text), "sequence_length": 256},
        "optim": {"lr": 1e-3},
        "precision": {"compute": precision},
        "run": {
            "steps": 900,
            "global_batch": ranks * ACCUMULATION,
            "micro_batch": 1,
            "directory": str(folder),
            "device": "cpu",
        },
        "ema": {"decays": [0.99]},
    }
    return parse_recipe(document, source="benchmark")


RECIPES: dict[str, Callable[[Path, str, int], Recipe]] = {"sd3": image_recipe, "qwen3": text_recipe}


class HeadwayLoop:
    """Headway's Trainer as ``headway train`` assembles it, listening for stop requests as a run does."""

    def __init__(self, recipe: Recipe, parts: Assembly) -> None:
        stop = StopSignals(recipe.run.directory)
        self.trainer = Trainer(recipe, parts, lambda: stop.pending() is not None, lambda kind, **fields: None)

    def step(self, batches: list[Batch]) -> float:
        """One step; returns the global mean loss."""
        return self.trainer.step(batches).loss


@dataclass
class Turns:
    """Lets the loops step in turns and times every step. Lightning's steps happen while this iterator is suspended."""

    steps: list[list[Batch]]
    loops: dict[str, Any]
    rounds: int
    lightning: LightningLoop | None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def run(self) -> None:
        """All rounds. Lightning, when it takes part, drives them: it asks for the batches that are left to it."""
        if self.lightning is None:
            assert not list(self.batches_for_lightning())
            return
        self.lightning.run(self.batches_for_lightning(), self.rounds * TURN)
        self.losses["lightning"] = self.lightning.module.losses

    def batches_for_lightning(self) -> Iterator[dict[str, torch.Tensor]]:
        """Takes the other loops' turns, and yields Lightning's micro-batches when its turn comes."""
        names = [*self.loops, *(["lightning"] if self.lightning else [])]
        self.seconds = {name: [] for name in names}
        self.cpu_seconds = {name: [] for name in names}
        self.losses = {name: [] for name in self.loops}
        for number in range(self.rounds):
            if number == WARM_UP_ROUNDS:
                gc.collect()
                gc.freeze()  # no loop's garbage collection has to look through the other loops' objects
            # Every loop comes first, last and after every other one in turn.
            shift = number % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 else reversed(order):
                dist.barrier()
                for batches in (self.steps[(number * TURN + k) % len(self.steps)] for k in range(TURN)):
                    began, cpu_began = time.perf_counter(), time.process_time()
                    if name == "lightning":
                        yield from (batch.tensors for batch in batches)
                    else:
                        given = batches if name == "headway" else [batch.tensors for batch in batches]
                        self.losses[name].append(self.loops[name].step(given))
                    self.seconds[name].append(time.perf_counter() - began)
                    self.cpu_seconds[name].append(time.process_time() - cpu_began)


def measure(case: Case, folder: Path, rounds: int, ranks: Ranks) -> dict[str, Any]:
    """Seconds of every step of each loop on this rank, the losses, and why a loop can't run."""
    recipe = RECIPES[case.model](folder, case.precision, case.ranks)
    parts = assemble(recipe, ranks, folder)
    steps = list(training_loader(recipe, parts, range(DISTINCT_STEPS)))
    tokenizers = dict(parts.built.frozen.caption_tokens.tokenizers) if parts.built.frozen else {}

    def task() -> Any:
        return new_task(recipe, tokenizers, ACCUMULATION)

    mesh = init_device_mesh("cpu", (ranks.world,), mesh_dim_names=("dp_shard",))
    loops: dict[str, Any] = {"raw": RawLoop(task(), mesh if ranks.world > 1 else None)}
    if ranks.world == 1:
        loops["raw_fully_shard"] = RawLoop(task(), mesh)
    loops["headway"] = HeadwayLoop(recipe, parts)
    cannot_run = {}
    try:
        loops["accelerate"] = AccelerateLoop(task(), ranks.world)
    except Exception as error:  # a library that can't run this layout: the table says so
        cannot_run["accelerate"] = f"{type(error).__name__}: {error}"
    turns = Turns(steps, loops, rounds, LightningLoop(task(), ranks.world))
    turns.run()
    return {
        "seconds": turns.seconds,
        "cpu_seconds": turns.cpu_seconds,
        "losses": turns.losses,
        "cannot_run": cannot_run,
    }


def rank_main(case: Case, rank: int, port: int, folder: Path, rounds: int) -> None:
    """One rank, in the environment that torchrun would give it when there are several."""
    torch.set_num_threads(1)
    if case.ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
    try:
        with start_ranks("cpu") as ranks:
            result = measure(case, folder, rounds, ranks)
            (folder / f"result-{rank}.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def on_ranks(case: Case, rounds: int) -> dict[str, Any]:
    """The case on forked ranks, put together: a step lasts as long as on its slowest rank."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        folder = Path(name)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=rank_main, args=(case, rank, port, folder, rounds)) for rank in range(case.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert all(process.exitcode == 0 for process in ranks), f"{case} failed"
        results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(case.ranks)]
    first = results[0]
    seconds, cpu_seconds = (
        {
            loop: over_ranks([result[kind][loop] for result in results], 0)[WARM_UP_ROUNDS * TURN :]
            for loop in first[kind]
        }
        for kind, over_ranks in (("seconds", np.max), ("cpu_seconds", np.sum))
    )
    return {
        "model": case.model,
        "precision": case.precision,
        "ranks": case.ranks,
        "layout": "FSDP2" if case.ranks > 1 else "one device",
        "steps": len(seconds["raw"]),
        "loops": {loop: summary(seconds, loop) | cpu_summary(cpu_seconds, loop) for loop in seconds},
        "largest_loss_difference": loss_difference(first["losses"]),
        "cannot_run": first["cannot_run"],
    }


def summary(seconds: dict[str, np.ndarray], loop: str) -> dict[str, Any]:
    """Median step, and the median of the rounds' ratios to the raw loop with its 95 % interval."""
    own, raw = (seconds[name].reshape(-1, TURN).sum(1) for name in (loop, "raw"))
    ratios = own / raw
    draws = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], 1), [0.025, 0.975])
    quartiles = np.quantile(seconds[loop], [0.25, 0.5, 0.75])
    return {
        "median_s": quartiles[1],
        "quartiles_s": [quartiles[0], quartiles[2]],
        "times_raw": float(np.median(ratios)),
        "times_raw_95": [low, high],
        "fastest_times_raw": float(seconds[loop].min() / seconds["raw"].min()),
    }


def cpu_summary(seconds: dict[str, np.ndarray], loop: str) -> dict[str, float]:
    """The same ratio of processor time, all ranks together."""
    own, raw = (seconds[name].reshape(-1, TURN).sum(1) for name in (loop, "raw"))
    return {"cpu_times_raw": float(np.median(own / raw))}


def loss_difference(losses: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference of each loop's loss from the raw loop's, over the first steps.

    Later ones amplify rounding: the same few micro-batches come again until they are learnt by heart.
    """
    raw = np.array(losses["raw"][:STEPS_COMPARED])
    return {loop: float(np.max(np.abs(np.array(own[:STEPS_COMPARED]) / raw - 1))) for loop, own in losses.items()}


CASES = [
    Case(model, precision, ranks)
    for ranks in (1, 2)
    for model, precision in (("sd3", "float32"), ("qwen3", "float32"), ("sd3", "bfloat16"))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="cases whose name (sd3-float32-1) contains this")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    results = []
    for case in CASES:
        if arguments.only not in f"{case.model}-{case.precision}-{case.ranks}":
            continue
        result = on_ranks(case, arguments.rounds + WARM_UP_ROUNDS)
        results.append(result)
        print(f"{case.model}, {case.precision}, {case.ranks} ranks ({result['layout']}), {result['steps']} steps")
        for loop, row in result["loops"].items():
            low, high = row["times_raw_95"]
            fastest = row["fastest_times_raw"]
            difference = result["largest_loss_difference"][loop]
            print(
                f"  {loop:16} {1e3 * row['median_s']:8.1f} ms  {row['times_raw']:6.3f}x  [{low:.3f}, {high:.3f}]"
                f"  fastest {fastest:6.3f}x  cpu {row['cpu_times_raw']:6.3f}x  loss within {difference:.1e}"
            )
        for loop, why in result["cannot_run"].items():
            print(f"  {loop:16} can't run: {why}")
        if case.precision == "float32":
            assert max(result["largest_loss_difference"].values()) < LOSS_TOLERANCE, "the loops do not train alike"
    if arguments.json:
        report = {
            "benchmark": "trainer_overhead",
            "torch": torch.__version__,
            "accelerate": accelerate.__version__,
            "lightning": lightning.__version__,
            "micro_batches_a_step": ACCUMULATION,
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
