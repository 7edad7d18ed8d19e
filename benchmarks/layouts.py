"""What each axis of a layout sends, counted from real steps beside its closed formula, and what it costs in time.

Traffic: tiny models take steps on gloo ranks while a dispatch mode counts every collective and send; the formulas are
in benchmarks/communication/formulas.py. A message is a collective or a send; bytes are what a rank puts on the wire in
the algorithm that needs the fewest. Shown is the rank that sends most on the axis; all ranks, and each collective by
itself, are compared: ``times formula`` is 1 where messages and bytes of all of them are exactly the formula's.

Time: layouts of a model of width 256 over the same global batch live in the same processes and take turns, and each
step lasts as long as on its slowest rank; ratios to FSDP are taken within a round, shown are their median with its 95 %
interval. gloo ranks share this machine's cores and its memory, so this tells what a layout costs beside the transfers:
its Python, its smaller kernels, its bubbles; not what it gains on devices.
Run: python benchmarks/layouts.py --json benchmarks/results/layouts.json
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401 - paid for once, before ranks are forked
import numpy as np
import torch
import torch.distributed as dist

from communication import recipes
from communication.cases import CASES, Case
from communication.comparison import compare, differs
from communication.observation import trainer_of
from headway.check.ranks import Place, joined, run_on_ranks
from headway.recipe import Recipe
from headway.train import training_loader

WARM_UP_ROUNDS = 2
GLOBAL_BATCH = 8
TIMEOUT_S = 1200.0
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
TIMED: list[tuple[str, int, dict[str, tuple[dict[str, Any], int]]]] = [
    (
        "decoder",
        2,
        {
            "FSDP": ({}, 2),
            "DDP": ({"dp_replicate": 2}, 2),
            "FSDP, blocks kept": ({"reshard_after_forward": False}, 2),
            "tensor parallel": ({"tp": 2, "sequence_parallel": False}, 4),
            "tensor and sequence parallel": ({"tp": 2}, 4),
            "Ulysses": ({"cp": 2}, 4),
            "ring": ({"cp": 2, "cp_kind": "ring"}, 4),
            "pipeline, 1F1B": ({"pp": 2}, 2),
            "pipeline, ZBV": ({"pp": 2, "pp_schedule": "zbv"}, 2),
        },
    ),
    (
        "decoder",
        4,
        {
            "FSDP": ({}, 2),
            "HSDP": ({"dp_replicate": 2}, 2),
            "tensor parallel x FSDP": ({"tp": 2}, 4),
            "Ulysses x FSDP": ({"cp": 2}, 4),
            "pipeline x FSDP": ({"pp": 2}, 2),
            "pipeline, 1F1B": ({"pp": 4}, 2),
        },
    ),
    ("experts", 2, {"FSDP": ({}, 2), "experts": ({"ep": 2}, 2)}),
]
"""Model, ranks, and by name: a layout and its micro-batch."""


def traffic(case: Case) -> dict[str, Any]:
    """Counted and by formula: see ``compare``."""
    with tempfile.TemporaryDirectory() as folder:
        found = compare(case, Path(folder))
    return {
        "layout": case.name,
        "model": case.kind,
        "ranks": case.ranks,
        "micro_batches": case.micro_batches,
        "exact": not any(differs(row) for row in found["rows"]),
        **found,
    }


def timed_recipe(kind: str, layout: dict[str, Any], micro_batch: int, folder: Path) -> Recipe:
    """A decoder of width 256 on sequences of 256 tokens."""
    config = (recipes.EXPERTS if kind == "experts" else recipes.DECODER) | WIDE
    config |= {"moe_intermediate_size": 384} if kind == "experts" else {}
    return recipes.recipe(
        kind,
        folder,
        {
            "model": {"config": config},
            "data": {"sequence_length": 256},
            "layout": layout,
            "run": {"global_batch": GLOBAL_BATCH, "micro_batch": micro_batch},
        },
    )


def step_seconds(place: Place, timed: dict[str, Recipe], rounds: int) -> dict[str, list[float]]:
    """Seconds of each layout's steps on this rank, one a round, in changing order."""
    with joined(place):
        trainers = {name: trainer_of(recipe) for name, recipe in timed.items()}
        batches = {
            name: next(iter(training_loader(trainer.recipe, trainer.parts, range(1))))
            for name, trainer in trainers.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        names = list(timed)
        for number in range(rounds):
            shift = number % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 else reversed(order):
                dist.barrier()
                began = time.perf_counter()
                trainers[name].step(batches[name])
                seconds[name].append(time.perf_counter() - began)
        return seconds


def times(kind: str, ranks: int, layouts: dict[str, tuple[dict[str, Any], int]], rounds: int) -> dict[str, Any]:
    """Median step of each layout, and its ratio to FSDP's."""
    with tempfile.TemporaryDirectory() as folder:
        timed = {name: timed_recipe(kind, *given, Path(folder)) for name, given in layouts.items()}
        load = os.getloadavg()[0]
        found = run_on_ranks(ranks, step_seconds, timed, rounds + WARM_UP_ROUNDS, timeout_s=TIMEOUT_S)
    slowest = {name: np.max([rank[name] for rank in found], 0)[WARM_UP_ROUNDS:] for name in layouts}
    return {
        "model": kind,
        "ranks": ranks,
        "steps": rounds,
        "load_before": load,
        "layouts": {name: summary(own, slowest["FSDP"]) for name, own in slowest.items()},
    }


def summary(own: np.ndarray, fsdp: np.ndarray) -> dict[str, Any]:
    """Median step, and the median of the rounds' ratios with its 95 % interval (bootstrap over rounds)."""
    ratios = own / fsdp
    draws = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], 1), [0.025, 0.975])
    return {"median_s": float(np.median(own)), "times_fsdp": float(np.median(ratios)), "times_fsdp_95": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=["traffic", "times"])
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    report: dict[str, Any] = {"benchmark": "layouts", "torch": torch.__version__, "traffic": [], "times": []}
    if arguments.json and arguments.only and arguments.json.exists():
        report |= json.loads(arguments.json.read_text())
        report[arguments.only] = []
    for case in CASES if arguments.only != "times" else []:
        report["traffic"].append(traffic(case))
        verdict = "as the formulas say" if report["traffic"][-1]["exact"] else "NOT as the formulas say"
        print(f"{case.name}, {case.kind}, {case.ranks} ranks: {verdict}", flush=True)
    for kind, ranks, layouts in TIMED if arguments.only != "traffic" else []:
        report["times"].append(times(kind, ranks, layouts, arguments.rounds))
        for name, row in report["times"][-1]["layouts"].items():
            print(f"{name}, {kind}, {ranks} ranks: {1e3 * row['median_s']:.0f} ms, {row['times_fsdp']:.2f} x FSDP")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [f"{case['layout']}, {case['model']}" for case in report["traffic"] if not case["exact"]]
    assert not wrong, f"not what the formulas say: {'; '.join(wrong)}"


if __name__ == "__main__":
    main()
