"""How much of a step pipeline ranks are idle under each schedule: measured, by their order alone, and by formula.

A decoder takes steps with a pipeline of 4 gloo ranks and 8 micro-batches. Each piece of work is padded to the same
length by sleeping: forward, gradients of inputs and gradients of weights of all of a rank's blocks last one unit each.

Measured: the idle share of the Timelines of the real ranks, from the step's first work to its last. Order: that of the
same orders when all work lasts exactly its units and transfers take no time. Formula: the schedule's paper, with its
source in benchmarks/schedules/bubbles.py. Micro-batches held: those whose activations the fullest and the emptiest rank
hold at once. The pictures of docs/layouts.md are drawn from the measured Timelines.
Run: python benchmarks/pipeline_schedules.py --json benchmarks/results/pipeline_schedules.json --pictures docs/schedules
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401 - paid for once, before ranks are forked
import torch

from communication import recipes
from headway.parallel.pipeline import SCHEDULES
from schedules.bubbles import formula_share, idle_share, in_flight, played
from schedules.picture import draw
from schedules.running import Span, run_schedule, timeline_of

RANKS, MICRO_BATCHES = 4, 8
UNIT_NS = 160_000_000
WIDTH = 960
PICTURES = Path(__file__).parents[1] / "docs" / "schedules"
TITLES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved 1F1B",
    "interleaved_zero_bubble": "Interleaved zero bubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}


def measure(schedule: str) -> dict[str, Any]:
    """One step's spans, and its idle shares."""
    stages = (SCHEDULES[schedule].stages_per_rank or (2,))[0]
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipes.recipe(
            "decoder",
            Path(folder),
            {
                "model": {"config": recipes.DECODER | {"num_hidden_layers": 2 * RANKS}},
                "layout": {"pp": RANKS, "pp_schedule": schedule, "pp_cuts": [2 // stages] * (RANKS * stages)},
                "run": {"global_batch": MICRO_BATCHES, "micro_batch": 1},
            },
        )
        spans = run_schedule(recipe, RANKS, UNIT_NS)
    return {
        "schedule": schedule,
        "stages_per_rank": stages,
        "measured": idle_share(timeline_of(spans)),
        "order": idle_share(timeline_of(played(spans, UNIT_NS // stages))),
        "formula": formula_share(schedule, RANKS, stages, MICRO_BATCHES),
        "held": in_flight(spans),
        "spans": [" ".join(map(str, span)) for span in spans],
    }


def spans_of(row: dict[str, Any]) -> list[Span]:
    """From a result."""
    parts = [line.split() for line in row["spans"]]
    return [Span(int(r), int(s), int(m), phase, int(t), int(d), int(a)) for r, s, m, phase, t, d, a in parts]


def write_pictures(rows: list[dict[str, Any]], folder: Path) -> None:
    """One a schedule, all with the same scale of time."""
    folder.mkdir(parents=True, exist_ok=True)
    timelines = {row["schedule"]: timeline_of(spans_of(row)) for row in rows}
    window = max(int(timeline.end_ns.max()) for timeline in timelines.values())
    for row in rows:
        schedule = row["schedule"]
        title = f"{TITLES[schedule]}: {100 * row['measured']:.1f} % idle"
        (folder / f"{schedule}.svg").write_text(draw(timelines[schedule], title, width=WIDTH, window_ns=window))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    parser.add_argument("--draw", action="store_true", help="measure nothing, only draw the result in --json")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if arguments.draw:
        write_pictures(json.loads(arguments.json.read_text())["results"], arguments.pictures)
        return
    rows = [measure(schedule) for schedule in SCHEDULES]
    for row in rows:
        shares = ", ".join(f"{what} {100 * row[what]:.1f} %" for what in ("measured", "order", "formula"))
        print(f"{row['schedule']:24} idle: {shares}; micro-batches held: {max(row['held'].values()):.1f}")
    write_pictures(rows, arguments.pictures)
    if arguments.json:
        facts = {"ranks": RANKS, "micro_batches": MICRO_BATCHES, "unit_ns": UNIT_NS, "torch": torch.__version__}
        report = {"benchmark": "pipeline_schedules", **facts, "results": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
