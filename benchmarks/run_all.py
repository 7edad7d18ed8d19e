"""Runs every benchmark of this folder, keeps its result in results/NAME.json, and writes docs/benchmarks.md.

Run: python benchmarks/run_all.py [NAME …] [--tables]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "lightning", "torchao")

Table = Callable[[Any], Iterator[list[str]]]


def trainer_overhead(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield [
        "model",
        "precision",
        "layout",
        "loop",
        "step (ms)",
        "times raw",
        "95 % interval",
        "fastest, times raw",
    ]
    for case in result["results"]:
        layout = "1 rank" if case["ranks"] == 1 else f"{case['ranks']} ranks, {case['layout']}"
        place = [case["model"], case["precision"], layout]
        for loop, row in case["loops"].items():
            low, high = row["times_raw_95"]
            ratios = [f"{row['times_raw']:.3f}", f"{low:.3f}-{high:.3f}", f"{row['fastest_times_raw']:.3f}"]
            yield [*place, loop, f"{1e3 * row['median_s']:.1f}", *ratios]
        for loop, why in case["cannot_run"].items():
            yield [*place, loop, f"can't run: {why}", "", "", ""]


def checkpoint_stall(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["ranks", "way", "stall (ms)", "times headway"]
    for case in result["results"]:
        for way, seconds in case["median_stall_s"].items():
            yield [str(case["ranks"]), way, f"{1e3 * seconds:.0f}", f"{case['times_headway'][way]:.1f}"]


def ema_step(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["parameters", "tensors", "what", "time (ms)", "times headway"]
    for case in result["results"]:
        place = [f"{case['parameters']:,}", str(case["tensors"])]
        for what, seconds in case["median_s"].items():
            yield [*place, what, f"{1e3 * seconds:.2f}", f"{case['times_headway'][what]:.2f}"]
        for what, why in case["cannot_run"].items():
            yield [*place, what, f"can't run: {why}", ""]


def data_sources(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["source", "plain loop (samples/s)", "Loader (samples/s)", "Loader, 2 workers (samples/s)", "Loader / plain"]
    for source, row in result["sources"].items():
        rates = [row[f"{way}_samples_per_s"] for way in ("plain", "loader", "loader_2_workers")]
        yield [source, *(f"{rate:,.0f}" for rate in rates), f"{row['loader_to_plain']:.2f}"]


def bfloat16_on_cpu(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["case", "float32 (ms)", "PyTorch's bfloat16 (ms)", "emulated bfloat16 (ms)"]
    for row in result["rows"]:
        yield [row["case"], *(f"{row[way]:.0f}" for way in ("float32_ms", "pytorch_ms", "emulated_ms"))]


def layouts(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading; of the traffic, then of the time."""
    yield ["layout", "model", "ranks", "axis", "messages", "bytes", "times formula"]
    for case in result["traffic"]:
        for axis in dict.fromkeys(row["axis"] for row in case["rows"]):
            of_axis = [row for row in case["rows"] if row["axis"] == axis]
            by_rank = {row["rank"]: [r for r in of_axis if r["rank"] == row["rank"]] for row in of_axis}
            most = max(by_rank.values(), key=lambda rows: sum(row["bytes"] for row in rows))
            messages, sent = (sum(row[what] for row in most) for what in ("messages", "bytes"))
            pairs = [(row[what], row[f"formula_{what}"]) for row in of_axis for what in ("messages", "bytes")]
            exact = all(counted == formula for counted, formula in pairs)
            ratio = "1" if exact else f"{sent / (sum(row['formula_bytes'] for row in most) or float('nan')):.4f}"
            place = [case["layout"], case["model"], str(case["ranks"]), axis]
            yield [*place, f"{messages:,}", f"{sent:,.0f}", ratio]
    yield []
    yield ["layout", "model", "ranks", "step (ms)", "times FSDP", "95 % interval", "load of the machine before"]
    for case in result["times"]:
        for layout, row in case["layouts"].items():
            low, high = row["times_fsdp_95"]
            numbers = [f"{1e3 * row['median_s']:.0f}", f"{row['times_fsdp']:.2f}", f"{low:.2f}-{high:.2f}"]
            yield [layout, case["model"], str(case["ranks"]), *numbers, f"{case['load_before']:.1f}"]


def pipeline_schedules(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["schedule", "stages a rank", "idle, measured (%)", "order (%)", "formula (%)", "micro-batches held"]
    for row in result["results"]:
        shares = [f"{100 * row[what]:.1f}" for what in ("measured", "order", "formula")]
        held = f"{max(row['held'].values()):g}-{min(row['held'].values()):g}"
        yield [row["schedule"], str(row["stages_per_rank"]), *shares, held]


def check_speed(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["example", "precision", "whole command (s)", "layouts", "nearest to its bound", "load of the machine before"]
    for row in result["results"]:
        statuses = ", ".join(f"{count} {status}" for status, count in row["statuses"].items())
        nearest = row["largest_of_bound"]
        told = f"{100 * nearest['share']:.0f} %: {nearest['error'].replace('_', ' ')} of {nearest['layout']}"
        yield [row["model"], row["precision"], f"{row['seconds']:.0f}", statuses, told, f"{row['load_before']:.1f}"]


def explain_speed(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["what reads", "seconds", "processor seconds", "peak memory (MiB)"]
    for side in ("headway", "hta"):
        if side in result:
            yield [side, *(f"{result[side][what]:,.1f}" for what in ("wall_s", "processor_s", "peak_mib"))]


def published_runs(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield [
        "source",
        "rows",
        "time: mean abs %",
        "bias %",
        "P90 %",
        "in range %",
        "regret %",
        "memory: rows",
        "mean abs %",
    ]
    every = {**result["sources"], **result["kinds"], "all": result["overall"]}
    for source, errors in every.items():
        time = ["", "", "", "", ""]
        if errors["rows"]:
            numbers = (errors["mean_absolute_percent"], errors["bias"], errors["p90"], 100 * errors["coverage"])
            time = [str(errors["rows"]), *(f"{number:.1f}" for number in numbers)]
        regret = "" if errors["regret"] is None else f"{errors['regret']:.1f}"
        memory = errors["memory"]
        held = [str(memory["rows"]), f"{memory['mean_absolute_percent']:.1f}"] if memory else ["", ""]
        yield [source, *time, regret, *held]


def planner_speed(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["devices", "layouts", "analytic pass (s)", "layouts/s", "rehearsals of blocks", "these (s)"]
    for row in result["results"]:
        numbers = [f"{row['analytic_s']:.1f}", f"{row['layouts_per_s']:,.0f}", str(row["rehearsals"])]
        yield [f"{row['devices']:,}", f"{row['layouts']:,}", *numbers, f"{row['rehearsing_s']:.1f}"]


def rehearsal_speed(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield [
        "model", "devices", "ranks rehearsed", "operators", "from few blocks: records (s)", "all (s)",
        "whole: records (s)", "all (s)", "largest difference",
    ]  # fmt: skip
    for row in result["results"]:
        ways = [f"{row[way][what]:.1f}" for way in ("extended", "whole") for what in ("records_s", "all_s")]
        counts = [f"{row['devices']:,}", str(row["ranks_rehearsed"]), f"{row['whole']['operators']:,}"]
        yield [row["model"], *counts, *ways, f"{row['difference']:.1g}"]


def cost_model(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["what", "sources", "mean abs %", "median %", "bias %", "P90 %"]
    for what, total in result["totals"].items():
        numbers = (total[key] for key in ("mape", "median", "bias", "p90"))
        yield [what, str(total["sources"]), *(f"{number:.1f}" for number in numbers)]


def predicted_vs_measured(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading: of each run, then of all."""
    yield ["data", "layout", "ranks", "step, predicted (ms)", "measured (ms)", "error %", "within"]
    for case in result["cases"]:
        yield [case["data"], case["layout"], str(case["ranks"]), *_beside(case, "step_time_s", 1e3, ".0f")]
    yield []
    yield ["data", "layout", "ranks", "peak memory, predicted (GiB)", "measured (GiB)", "error %", "within"]
    for case in result["cases"]:
        yield [case["data"], case["layout"], str(case["ranks"]), *_beside(case, "peak_memory_gib", 1, ".3f")]
    yield []
    yield ["of all runs", "median |error| %", "largest |error| %", "within the range (%)"]
    for what in ("step_time_s", "peak_memory_gib"):
        row = result[what]
        yield [what, f"{row['median_percent']:.1f}", f"{row['largest_percent']:.1f}", f"{100 * row['within']:.0f}"]


def slow_link(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["link", "layout", "ranks", "step, predicted (ms)", "measured (ms)", "error %", "within"]
    for case in result["cases"]:
        yield [case["rate"], case["layout"], str(case["ranks"]), *_beside(case, "step_time_s", 1e3, ".0f")]


def _beside(case: Any, what: str, times: float, form: str) -> list[str]:
    """Predicted with its range, measured, error, and whether the range holds what was measured."""
    value, low, high = (times * case["predicted"][what][end] for end in ("value", "low", "high"))
    error, within = (case["errors"][f"{what}_{name}"] for name in ("error_percent", "within"))
    forecast = f"{value:{form}} ({low:{form}}-{high:{form}})"
    return [forecast, f"{times * case['measured'][what]:{form}}", f"{error:+.1f}", "yes" if within else "no"]


def precision_convergence(result: Any) -> Iterator[list[str]]:
    """Rows, the first of them the heading."""
    yield ["run", "loss at the end", "minus float32's", "largest difference in a step"]
    for name, found in result["compared"].items():
        yield [
            name,
            f"{found['last_loss']:.4f}",
            f"{found['last_difference']:+.4f}",
            f"{found['largest_difference']:.4f}",
        ]


TABLES: dict[str, Table] = {
    table.__name__: table
    for table in (
        trainer_overhead,
        checkpoint_stall,
        ema_step,
        data_sources,
        bfloat16_on_cpu,
        layouts,
        pipeline_schedules,
        check_speed,
        explain_speed,
        planner_speed,
        rehearsal_speed,
        cost_model,
        published_runs,
        predicted_vs_measured,
        precision_convergence,
        slow_link,
    )
}
TABLES_BESIDE = {
    "explain_speed": FOLDER.parents[1] / "shared" / "traces",
    "cost_model": FOLDER.parents[1] / "shared" / "microbench",
    "published_runs": FOLDER.parents[1] / "shared" / "published",
}
"""Public measurements that lie beside the repository, by the benchmark that reads them."""


KEEPS_ITS_OWN = {"gpu"}
"""Keeps its results itself, in a folder for each device."""


def lacking(name: str) -> str | None:
    """What a benchmark needs that is not here; None: nothing."""
    if name in TABLES_BESIDE and not TABLES_BESIDE[name].exists():
        return f"{TABLES_BESIDE[name]} is not there"
    if name == "explain_speed" and "HTA_PYTHON" not in os.environ:
        return "HTA_PYTHON does not name the Python of an environment with HolisticTraceAnalysis"
    if name == "slow_link" and os.geteuid() != 0:
        return "two hosts as network namespaces need root"
    return None


def machine() -> dict[str, Any]:
    """What the results depend on, and when they were made."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{library: importlib.metadata.version(library) for library in LIBRARIES},
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()


def run(name: str) -> None:
    """Run one benchmark and keep its result, with the machine that it ran on."""
    if (reason := lacking(name)) is not None:
        print(f"passed over: {reason}", flush=True)
        return
    path = RESULTS / f"{name}.json"
    subprocess.run([sys.executable, FOLDER / f"{name}.py", "--json", path], check=True)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": machine()}, indent=1) + "\n")


def page() -> str:
    """All results as Markdown: what each benchmark measures is the first part of its script's docstring."""
    parts = [
        "# Benchmarks",
        "Written by `make bench` (`python benchmarks/run_all.py`) from `benchmarks/results/*.json`. Numbers are "
        "medians unless a heading says otherwise, to be compared within a table: there all ways took turns in one run.",
    ]
    for name, table in TABLES.items():
        if not (RESULTS / f"{name}.json").exists():
            parts += [f"## {name}", _about(name), "No result is kept."]
            continue
        result = json.loads((RESULTS / f"{name}.json").read_text())
        facts = ", ".join(f"{key} {value}" for key, value in result.get("machine", {}).items()) or "not recorded"
        parts += [f"## {name}", _about(name), _markdown(list(table(result))), f"Measured on: {facts}."]
    return "\n\n".join(parts) + "\n"


def _about(name: str) -> str:
    text = (FOLDER / f"{name}.py").read_text().split('"""')[1]
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(part.partition(" Run: python")[0] for part in paragraphs if not part.startswith("python "))


def _markdown(rows: list[list[str]]) -> str:
    """A table; an empty row begins another one."""
    if [] in rows:
        end = rows.index([])
        return f"{_markdown(rows[:end])}\n\n{_markdown(rows[end + 1 :])}"
    heading, *body = rows
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    scripts = sorted({path.stem for path in FOLDER.glob("*.py") if path != Path(__file__)} - KEEPS_ITS_OWN)
    missing = [name for name in scripts if name not in TABLES]
    assert not missing, f"no table for {', '.join(missing)}: add one to {Path(__file__).name}"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="benchmarks to run (all)")
    parser.add_argument("--tables", action="store_true", help="run nothing, only write the page")
    arguments = parser.parse_args()
    for name in [] if arguments.tables else arguments.names or scripts:
        print(f"== {name}", flush=True)
        run(name)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
