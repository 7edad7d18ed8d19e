"""``headway rehearse``: what a step of a recipe takes on a cluster that need not be there."""

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.recipe_show import Overrides, RecipeFile
from headway.cli.result import JsonPath, can_be_written, give_result, write_or_tell

if TYPE_CHECKING:
    from headway.rehearse import Prediction

WIDTH = 120
"""Columns that the tables need."""
ROWS = 10
"""Of each table on a terminal; all are in the JSON."""
BAR = 40
"""Characters of a bar that is the whole step."""


def rehearse(
    recipe: RecipeFile,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A cluster or accelerator by name, or a file.", show_default=False)
    ],
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="Devices to train on.", show_default=False)],
    trace: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write the predicted timeline for Perfetto.", callback=can_be_written),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write a page with lanes, memory and shares.", callback=can_be_written),
    ] = None,
    expandable_segments: Annotated[
        bool, typer.Option("--expandable-segments", help="Torch's allocator is set to expandable segments.")
    ] = False,
    overrides: Overrides = None,
    json_: JsonPath = None,
) -> None:
    """Predict a training step: its time, its memory, and where both go, each with a range.

    Example: headway rehearse examples/llama-3.1-8b.toml --cluster dgx-h100 --devices 64 --html step.html

    The real step runs on fake tensors for one rank of each pipeline stage, on this machine's CPU; what it does is then
    played on a model of the cluster. A range should hold four of five measurements.
    """
    from headway.cluster import cluster_of
    from headway.recipe import load_recipe
    from headway.rehearse import check_devices, predict, roles, write_page
    from headway.rehearse import rehearse as record_of
    from headway.timeline import write_chrome_trace

    resolved = load_recipe(recipe, overrides or ())
    hardware = cluster_of(cluster)
    check_devices(hardware, devices)
    began = time.monotonic()
    prediction = predict(
        (record_of(resolved, devices, role.rank) for role in roles(resolved, devices)),
        hardware,
        expandable_segments=expandable_segments,
    )
    result = {"recipe": str(recipe), "seconds": time.monotonic() - began} | prediction.result_json()
    name = f"{resolved.model.class_name} on {devices} × {hardware.accelerator.name}"
    if trace is not None:
        write_or_tell(trace, lambda path: write_chrome_trace(prediction.timeline, path))
    if html is not None:
        write_or_tell(html, lambda path: write_page(prediction, name, path))
    give_result(result, _rendered(prediction, result, name), json_)


def _rendered(prediction: "Prediction", result: dict[str, Any], name: str) -> str:
    """What there is to know, as text for this terminal."""
    console = Console(highlight=False, width=max(WIDTH, shutil.get_terminal_size().columns))
    with console.capture() as capture:
        console.print(f"[bold]{name}[/] (predicted in {result['seconds']:.1f} s)")
        console.print(_headline(result["prediction"]))
        console.print(_shares(prediction))
        console.print(_holders(result["memory"]))
        console.print(_operators(result["operators"][:ROWS]))
        if result["collectives"]:
            console.print(_collectives(result["collectives"][:ROWS]))
    return capture.get().rstrip("\n")


def _headline(found: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("step time", _ranged(found["step_time_s"], "s"))
    table.add_row("peak memory", _ranged(found["peak_memory_gib"], "GiB"))
    if found["oom_probability"] is not None:
        table.add_row("out of memory", f"{found['oom_probability']:.1%}")
    table.add_row(
        "a device",
        f"{found['tokens_per_s_per_device']:,.0f} tokens/s, "
        f"{found['samples_per_s_per_device']:.3g} samples/s, {found['tflops_per_device']:.0f} TFLOP/s",
    )
    if found["mfu"] is not None:
        table.add_row("MFU, HFU", f"{found['mfu']:.1%}, {found['hfu']:.1%}")
    return table


def _ranged(number: dict[str, float], unit: str) -> str:
    return f"{number['value']:.4g} {unit} ({number['low']:.4g} to {number['high']:.4g})"


def _shares(prediction: "Prediction") -> Table:
    table = Table(title="where the time goes (mean of the pipeline's ranks)", title_justify="left", box=None)
    for name, seconds in prediction.shares.named():
        share = seconds / max(prediction.shares.total, 1e-12)
        table.add_row(name, f"{seconds:.4g} s", f"{share:.1%}", "█" * round(BAR * share))
    return table


def _holders(memory: dict[str, Any]) -> Table:
    table = Table(title=f"what holds the peak on rank {memory['rank']}", title_justify="left", box=None)
    for name, size in memory["held_by"].items():
        table.add_row(name, f"{size:.4g} GiB", f"{size / max(memory['peak_gib'], 1e-12):.1%}")
    return table


def _operators(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="operators", title_justify="left", box=None)
    for heading in ("operator", "phase", "count", "time, s", "share", "TFLOP/s", "GB moved"):
        table.add_column(heading, justify="left" if heading in ("operator", "phase") else "right")
    for row in rows:
        rate = "" if row["tflops_per_s"] is None else f"{row['tflops_per_s']:.0f}"
        table.add_row(
            row["operator"],
            row["phase"],
            f"{row['count']:,}",
            f"{row['time_s']:.4g}",
            f"{row['share']:.1%}",
            rate,
            f"{row['gb_moved']:,.0f}",
        )
    return table


def _collectives(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="collectives", title_justify="left", box=None)
    for heading in ("axis", "collective", "phase", "ranks", "count", "GB", "time, s", "exposed, s"):
        table.add_column(heading, justify="left" if heading in ("axis", "collective", "phase") else "right")
    for row in rows:
        table.add_row(
            row["axis"],
            row["collective"],
            row["phase"],
            f"{row['ranks']:,}",
            f"{row['count']:,}",
            f"{row['gb']:.4g}",
            f"{row['time_s']:.4g}",
            f"{row['exposed_s']:.4g}",
        )
    return table
