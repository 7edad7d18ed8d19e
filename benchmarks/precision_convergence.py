"""The demo trained in float32, bfloat16, bfloat16 weights rounded at random and float8 products, over the same samples.

Samples, noise and timesteps of a step are the same in every run, so losses can be compared step by step. Products in
float8 are emulated: the numbers of a GPU, multiplied in float32. The optimizer is AdamW, whose updates alone can be
rounded at random. Writes the losses as JSON, draws them, and writes the page of docs about low precision.

Run: python benchmarks/precision_convergence.py --json benchmarks/results/precision_convergence.json
     --page docs/precision.md [--only NAME …]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headway.parallel import start_ranks
from headway.recipe import Recipe, load_recipe
from headway.train import Trainer, assemble, training_loader

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
STEPS, BATCH = 200, 32
BFLOAT16_WEIGHTS = {"precision.master": "bfloat16", "precision.compute": "bfloat16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"precision.compute": "float32"},
    "bfloat16": {"precision.compute": "bfloat16"},
    "bfloat16 weights, to nearest": BFLOAT16_WEIGHTS,
    "bfloat16 weights, at random": BFLOAT16_WEIGHTS | {"precision.stochastic_rounding": True},
    "float8_tensorwise": {"precision.matmul": "float8_tensorwise"},
    "float8_rowwise": {"precision.matmul": "float8_rowwise"},
    "mxfp8": {"precision.matmul": "mxfp8"},
}
LAST = 40
"""Steps at the end over which losses are averaged."""
SMOOTHED = 15
COLOURS = ("#808080", "#4f9be8", "#d98a2b", "#5aa84e", "#d0605e", "#9a6cc4", "#3aa6a0")


def recipe_of(variant: str, directory: Path) -> Recipe:
    """The demo, shortened, on one rank."""
    keys: dict[str, Any] = {
        "run.steps": STEPS,
        "run.global_batch": BATCH,
        "run.micro_batch": BATCH,
        "run.directory": directory,
        "run.device": "cpu",
        "optim.kind": "adamw",
        "optim.decay_steps": STEPS // 3,
        "sample.prompts": "[]",
        "metrics.writers": "[]",
        **VARIANTS[variant],
    }
    settings = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    return load_recipe(DEMO, settings)


def train(variant: str) -> dict[str, Any]:
    """Losses and gradient norms of all steps, and the seconds that they took."""
    with tempfile.TemporaryDirectory() as folder, start_ranks("cpu") as ranks:
        recipe = recipe_of(variant, Path(folder))
        parts = assemble(recipe, ranks, recipe.run.directory)
        trainer = Trainer(recipe, parts, lambda: False, lambda kind, **fields: None)
        began = time.perf_counter()
        results = [trainer.step(batches) for batches in training_loader(recipe, parts, range(STEPS))]
        return {
            "precision": recipe.precision.model_dump(),
            "losses": [result.loss for result in results],
            "grad_norms": [result.grad_norm for result in results],
            "seconds": time.perf_counter() - began,
        }


def compared(runs: dict[str, Any]) -> dict[str, Any]:
    """Of each run the mean loss at the end, and how far it is from float32's, step by step."""
    exact = runs["float32"]["losses"]
    rows = {}
    for name, run in runs.items():
        apart = [loss - right for loss, right in zip(run["losses"], exact, strict=True)]
        rows[name] = {
            "last_loss": statistics.mean(run["losses"][-LAST:]),
            "last_difference": statistics.mean(apart[-LAST:]),
            "largest_difference": max(map(abs, apart)),
        }
    return rows


PAGE = """# Low precision

What a recipe can ask for, and what it does to a training that is small enough for a CPU. Written by
`python benchmarks/precision_convergence.py` (its first lines say how).

Keys of `[precision]`:

- `compute`, `master`, `reduce`: dtype of the passes, of the weights that are stepped on, of gradient reduction.
- `stochastic_rounding = true`, with `master = "bfloat16"`: AdamW's updates are rounded up or down at random, so that
  their mean is exact; there are no float32 weights. The random numbers are keyed by (seed, parameter, element, step):
  they are the same on every layout.
- `matmul`: products of the blocks' linear layers: `compute`, `float8_tensorwise` and `float8_rowwise` (torchao), or
  `mxfp8` (32 numbers to a scale, a power of two). Scales are of the numbers at hand: there is no state to save, and
  recomputation finds the same ones.
- `keep_high`: layers whose products stay in `compute`; by default the first and the last block, norms, modulation,
  routers and adapters. Embeddings, head and text encoders always stay.
- `float8_all_gather = true`, with `float8_tensorwise`: FSDP gathers weights as float8.

A GPU without such tensor cores refuses the run before it starts, and says what is nearest. On CPUs products are
emulated: of the same rounded numbers, in float32. `headway check --precision recipe` holds layouts of such a recipe
against float32, beside bfloat16.

## The demo in each precision

The demo ({steps} steps of {batch} pictures, AdamW) over the same samples, noise and timesteps. The losses are of
training; float8 products are those of the two middle blocks of four.

![losses](precision_convergence.svg)

{table}

Losses are means of the last {last} steps, whose samples differ between steps: the difference to float32, step by step,
tells more than the loss. One seed. To nearest, the optimizer's moments are in bfloat16 as well, as torch.optim.AdamW
keeps them; at random they are in float32.
"""


def page(result: dict[str, Any]) -> str:
    """docs/precision.md."""
    rows = [["run", "loss at the end", "minus float32's", "largest difference in a step"], ["---"] * 4]
    for name, found in result["compared"].items():
        apart = f"{found['last_difference']:+.4f}" if name != "float32" else ""
        rows.append([name, f"{found['last_loss']:.4f}", apart, f"{found['largest_difference']:.4f}" if apart else ""])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return PAGE.format(steps=result["steps"], batch=result["batch"], last=LAST, table=table)


def smoothed(values: list[float]) -> list[float]:
    """Means of ``SMOOTHED`` neighbours, so that curves can be told apart."""
    half = SMOOTHED // 2
    return [statistics.mean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def drawn(runs: dict[str, Any]) -> str:
    """SVG: losses above, and below how far each is from float32's."""
    losses = {name: smoothed(run["losses"]) for name, run in runs.items()}
    apart = {
        name: smoothed([a - b for a, b in zip(run["losses"], runs["float32"]["losses"], strict=True)])
        for name, run in runs.items()
    }
    width, font = 760, "font-family='DejaVu Sans, Verdana, Helvetica, sans-serif' fill='#808080'"
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='560' viewBox='0 0 {width} 560'>"]
    parts += _panel("loss", losses, top=30, height=280, width=width, font=font)
    parts += _panel("loss − float32's", apart, top=350, height=120, width=width, font=font)
    for number, name in enumerate(runs):
        x, y = 60 + number % 3 * 235, 500 + number // 3 * 18
        parts.append(f"<rect x='{x}' y='{y - 5}' width='16' height='4' fill='{COLOURS[number]}'/>")
        parts.append(f"<text x='{x + 22}' y='{y}' {font} font-size='12'>{name}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, curves: dict[str, list[float]], *, top: int, height: int, width: int, font: str) -> list[str]:
    low = min(min(curve) for curve in curves.values())
    high = max(max(low + 1e-6, *curve) for curve in curves.values())
    left, right = 60, width - 10

    def place(step: int, value: float) -> str:
        x = left + (right - left) * step / (STEPS - 1)
        return f"{x:.1f},{top + height * (high - value) / (high - low):.1f}"

    parts = [f"<text x='{left}' y='{top - 8}' {font} font-size='13' font-weight='bold'>{title}</text>"]
    for value, y in ((high, top), (low, top + height)):
        parts.append(f"<text x='4' y='{y + 4}' {font} font-size='11'>{value:.3g}</text>")
        parts.append(f"<path d='M{left} {y}H{right}' stroke='#808080' stroke-width='0.5'/>")
    for number, curve in enumerate(curves.values()):
        points = " ".join(place(step, value) for step, value in enumerate(curve))
        parts.append(f"<polyline points='{points}' fill='none' stroke='{COLOURS[number]}' stroke-width='1.3'/>")
    parts.append(f"<text x='{right - 60}' y='{top + height + 14}' {font} font-size='11'>step {STEPS}</text>")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="Runs that it holds already are kept.")
    parser.add_argument("--page", type=Path, help="Also writes the picture beside it.")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--in-this-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:  # each run has a process group of its own
        arguments.json.write_text(json.dumps(train(arguments.in_this_process)))
        return
    kept = json.loads(arguments.json.read_text())["runs"] if arguments.json.exists() else {}
    for variant in arguments.only:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, "--in-this-process", variant, "--json", file.name]
            subprocess.run(command, check=True)
            kept[variant] = json.loads(Path(file.name).read_text())
        runs = {name: kept[name] for name in VARIANTS if name in kept}
        result = {
            "benchmark": "precision_convergence",
            "torch": torch.__version__,
            "steps": STEPS,
            "batch": BATCH,
            "compared": compared(runs) if "float32" in runs else {},
            "runs": runs,
        }
        arguments.json.write_text(json.dumps(result, indent=1))
        print(f"{variant}: {kept[variant]['losses'][-1]:.4f} in {kept[variant]['seconds']:.0f} s")
    if arguments.page and "float32" in kept:
        arguments.page.write_text(page(json.loads(arguments.json.read_text())))
        picture = arguments.page.with_name("precision_convergence.svg")
        picture.write_text(drawn({name: kept[name] for name in VARIANTS if name in kept}))


if __name__ == "__main__":
    main()
