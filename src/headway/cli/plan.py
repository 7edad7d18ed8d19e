"""``headway plan``: the best layouts for a recipe on a cluster that need not be there."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.recipe_show import Overrides, RecipeFile
from headway.cli.result import JsonPath, can_be_written, give_result, is_cluster_file, write_or_tell
from headway.errors import UserError

if TYPE_CHECKING:
    from headway.cluster import Cluster
    from headway.plan.search import Planned

WIDTH = 120
"""Columns that the tables need."""
ROWS = 10
"""Groups of rejected layouts on a terminal; all are in the JSON."""
PRECISIONS: dict[str, list[Literal["bfloat16", "float32"]] | None] = {
    "auto": None,
    "bfloat16": ["bfloat16"],
    "float32": ["float32"],
    "both": ["bfloat16", "float32"],
}
MOST_DEVICES = 4096
"""That a cluster may have for all of them to be meant when nothing else is said."""


def plan(
    recipe: RecipeFile,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A cluster or accelerator by name, or a file; not needed with --calibrate-from.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="N[,N…]", help="Devices to train on, or several numbers to choose from; all there are."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Plans to rehearse whole and to show.")] = 3,
    price_per_device_hour: Annotated[
        float | None, typer.Option(metavar="X", help="Rank by the cost of a step in place of its time.")
    ] = None,
    precision: Annotated[
        Literal["auto", "bfloat16", "float32", "both"],
        typer.Option(help="Of forward and backward passes; auto: bfloat16, the recipe's, and on CPUs both."),
    ] = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="Say why the first plan beats the second.")] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write the recipe with the best plan.", callback=can_be_written),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write a page with every layout's time and memory.", callback=can_be_written),
    ] = None,
    calibrate_from: Annotated[
        Path | None,
        typer.Option(
            "--calibrate-from",
            metavar="RUN",
            help="Bring the cluster (not given: the one that RUN was predicted on) in line with what RUN measured.",
        ),
    ] = None,
    calibrated_to: Annotated[
        Path | None,
        typer.Option(
            "--calibrated-to",
            metavar="FILE",
            help="Where that cluster is written; RUN/calibrated.toml when not given.",
            callback=is_cluster_file,
        ),
    ] = None,
    overrides: Overrides = None,
    json_: JsonPath = None,
) -> None:
    """Find the layout, micro-batch, checkpointing and precision that train a recipe fastest, or cheapest.

    Example: headway plan examples/llama-3.1-8b.toml --cluster dgx-h100 --devices 64 --explain --to planned.toml

    A few blocks are rehearsed on this machine's CPU; every layout that training would take is made up of them, and
    those that don't fit the memory are left out. The best are rehearsed whole and ranked by that. Needs no weights and
    no data. A range should hold four of five measurements.

    With --calibrate-from runs/one the step of that run is predicted again, and the rate that most of it hangs on is
    scaled until it takes as long as it did; the plan stands on the cluster that this makes, which is written as a file.
    """
    from headway.plan.explanation import explanation
    from headway.plan.plan_page import write_plan_page
    from headway.plan.search import json_of
    from headway.plan.search import plan as search
    from headway.recipe import load_recipe, to_toml

    if price_per_device_hour is not None and not 0 < price_per_device_hour < float("inf"):
        raise UserError(f"--price-per-device-hour {price_per_device_hour}: give a price above 0")
    resolved = load_recipe(recipe, overrides or ())
    hardware, learned = _hardware(cluster, calibrate_from, calibrated_to)
    progress = Console(stderr=True, highlight=False)
    planned = search(
        resolved,
        hardware,
        _device_counts(devices, hardware),
        top=top,
        price=price_per_device_hour,
        precisions=PRECISIONS[precision],
        on_rehearsed=lambda text: progress.print(text, markup=False) if progress.is_terminal else None,
    )
    best = planned.plans[0].choice
    if to is not None:
        write_or_tell(to, lambda path: path.write_text(to_toml(best.applied_to(resolved)), encoding="utf-8"))
    name = f"{resolved.model.class_name} on {best.devices} × {hardware.accelerator.name}"
    if html is not None:
        write_or_tell(html, lambda path: write_plan_page(planned, name, path))
    result = {"recipe": str(recipe)} | json_of(planned) | ({} if learned is None else {"calibrated_from": learned})
    told = explanation(planned) if explain else None
    if told is not None:
        result["explanation"] = told
    give_result(result, _rendered(planned, result, name, told), json_)


def _hardware(name: str | None, run: Path | None, to: Path | None) -> tuple["Cluster", dict[str, Any] | None]:
    """The cluster to plan for, and what a run taught of it. Raises UserError."""
    from headway.cluster import cluster_of, cluster_toml
    from headway.runs import RunDirectory

    if run is None:
        if name is None or to is not None:
            missing = "--cluster NAME|FILE" if name is None else "--calibrate-from RUN, or leave out --calibrated-to"
            raise UserError(f"give {missing}")
        return cluster_of(name), None
    from headway.calibrate import calibrate_from

    own = RunDirectory(run).cluster_file
    if name is None and not own.exists():
        raise UserError(f"{run} was not trained with --cluster: give --cluster, what it was trained on as you know it")
    found = calibrate_from(run, cluster_of(name or str(own)))
    file = to or run / "calibrated.toml"
    write_or_tell(file, lambda path: path.write_text(cluster_toml(found.cluster), encoding="utf-8"))
    return found.cluster, found.as_json() | {"file": str(file)}


def _device_counts(given: str | None, cluster: "Cluster") -> list[int]:
    if given is None:
        count = cluster.levels[-1].devices if cluster.levels else 1
        if count > MOST_DEVICES:
            raise UserError(f"cluster {cluster.name} does not say how many devices there are: give --devices N")
        return [count]
    try:
        found = sorted({int(part) for part in given.split(",")})
    except ValueError:
        raise UserError(f"--devices {given}: give a number, or several with commas between them") from None
    if found[0] < 1:
        raise UserError(f"--devices {given}: give numbers from 1 up")
    return found


def _rendered(planned: "Planned", result: dict[str, Any], name: str, told: str | None) -> str:
    """What there is to know, as text for this terminal."""
    console = Console(highlight=False, width=max(WIDTH, shutil.get_terminal_size().columns))
    with console.capture() as capture:
        if "calibrated_from" in result:
            console.print(_learned(result["calibrated_from"]), markup=False)
            console.print(f"written: {result['calibrated_from']['file']}\n", markup=False, soft_wrap=True)
        console.print(
            f"[bold]{name}[/]: {result['evaluated']:,} layouts in {result['analytic_seconds']:.1f} s, "
            f"{result['rehearsed_blocks']} rehearsals of blocks, {len(planned.plans)} of whole steps; "
            f"{result['seconds']:.0f} s in all"
        )
        console.print(_plans(planned, result))
        if told is not None:
            console.print(told + "\n", markup=False)
        if result["rejected"]:
            console.print(_rejected(result["rejected"]))
        console.print("the first as overrides:", style="bold")
        console.print("  " + " ".join(f"--set {text}" for text in result["plans"][0]["overrides"]), markup=False)
    return capture.get().rstrip("\n")


def _learned(found: dict[str, Any]) -> str:
    """What a run taught."""
    before, after = found["predicted_step_time_s"], found["corrected_step_time_s"]
    memory = "" if found["process_gib"] is None else f" A process takes {found['process_gib']:.3g} GiB besides tensors."
    return (
        f"{found['run']} took {found['measured_step_time_s']:.4g} s a step where {before['value']:.4g} s "
        f"({before['low']:.4g} to {before['high']:.4g}) were predicted. Most of that hangs on the {found['part']} "
        f"({found['share']:.0%}): its rates are taken × {found['factor']:.3g}, which makes it {after['value']:.4g} s "
        f"({after['low']:.4g} to {after['high']:.4g}).{memory}"
    )


def _plans(planned: "Planned", result: dict[str, Any]) -> Table:
    table = Table(title="plans, best first", title_justify="left", box=None)
    table.add_column("")
    table.add_column("layout", ratio=1)
    headings = ["step, s", "from", "to", "analytic, s", "GiB", "from", "to", "OOM", "MFU"]
    headings += ["cost of a step"] if planned.price is not None else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (one, row) in enumerate(zip(planned.plans, result["plans"], strict=True), start=1):
        found = row["prediction"]
        time, memory = found["step_time_s"], found["peak_memory_gib"]
        cells = [f"{time[end]:.4g}" for end in ("value", "low", "high")]
        cells.append(f"{row['analytic']['step_time_s']['value']:.4g}")
        cells += [f"{memory[end]:.3g}" for end in ("value", "low", "high")]
        cells.append("" if found["oom_probability"] is None else f"{found['oom_probability']:.0%}")
        cells.append("" if found["mfu"] is None else f"{found['mfu']:.0%}")
        if planned.price is not None:
            cells.append(f"{row['cost_of_step']['value']:.4g}")
        table.add_row(str(number), one.choice.name, *cells)
    return table


def _rejected(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="rejected", title_justify="left", box=None)
    table.add_column("layouts", justify="right")
    table.add_column("why, with one of them", ratio=1)
    for row in rows[:ROWS]:
        table.add_row(f"{row['count']:,}", f"{row['reason']}  ({row['layout']})")
    if len(rows) > ROWS:
        table.add_row("", f"and {len(rows) - ROWS} reasons more (--json)")
    return table
