"""``headway check``: whether every layout of a recipe computes what one device does."""

import shutil
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.recipe_show import Overrides, RecipeFile
from headway.cli.result import JsonPath, give_result
from headway.errors import UserError

if TYPE_CHECKING:
    from headway.check import CheckResult, Layout, LayoutResult

WIDTH = 120
"""Columns that the table needs."""
STYLES = {"passed": "green", "wrong": "bold red", "failed": "bold red", "refused": "yellow"}


def check(
    recipe: RecipeFile,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="A small model of the same kind on synthetic data: needs no files.")
    ] = False,
    layouts: Annotated[
        str, typer.Option(help='auto, or a list such as "tp=2,dp_shard=2;pp=2,pp_schedule=zbv".')
    ] = "auto",
    precision: Annotated[
        Literal["float32", "bfloat16", "recipe"],
        typer.Option(help="Of forward and backward passes; recipe: its own, with its float8 products."),
    ] = "float32",
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For each layout.")] = 300.0,
    overrides: Overrides = None,
    json_: JsonPath = None,
) -> None:
    """Prove that layouts compute what one device does, on CPU processes, before GPUs are paid for.

    Example: headway check examples/flux-full.toml --shrink --layouts "tp=2,dp_shard=2;cp=2"

    For each layout it compares with a plain PyTorch loop in one process: loss, every parameter's gradient, the gradient
    norm, weights after one and three steps, averages, and the step after a checkpoint that was saved in another layout.
    Parameters are perturbed first, as norms at 1 and gates at 0 hide faults. In bfloat16 and in float8 a layout may be
    twice as far from float32 as one device is, and one device as far as the analysis of rounding allows.

    Exits with 1 when a layout is wrong or fails, with 2 when one that was asked for by name is refused.
    """
    from headway.check import check_recipe, parse_layouts
    from headway.recipe import load_recipe

    asked = None if layouts == "auto" else parse_layouts(layouts)
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()

    def on_layout(number: int, count: int, layout: "Layout", told: str, seconds: float) -> None:
        progress.print(
            f"[{time.monotonic() - began:5.0f} s] {number} of {count}  {layout.name}: {told} in {seconds:.1f} s",
            markup=False,
        )

    result = check_recipe(
        load_recipe(recipe, overrides or ()),
        asked,
        shrink=shrink,
        precision=precision,
        timeout_s=timeout,
        on_layout=on_layout,
    )
    give_result({"recipe": str(recipe)} | result.as_json(), _rendered(result), json_)
    if not result.holds:
        raise typer.Exit(1)
    refused = [layout for layout in result.layouts if layout.status == "refused"]
    if asked is not None and refused:
        raise UserError("\n".join(f"{layout.layout}: {layout.reason}" for layout in refused))


def _rendered(result: "CheckResult") -> str:
    """The table and what is to be said of layouts that did not pass, as text for this terminal."""
    console = Console(highlight=False, width=max(WIDTH, shutil.get_terminal_size().columns))
    with console.capture() as capture:
        console.print(_table(result))
        for layout in result.layouts:
            if layout.status != "passed":
                _explain(console, layout)
        counts = {status: sum(layout.status == status for layout in result.layouts) for status in STYLES}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        console.print(f"{told} in {result.seconds:.0f} s ({result.precision})")
    return capture.get().rstrip("\n")


def _table(result: "CheckResult") -> Table:
    from headway.check import ERRORS

    table = Table(title=f"{result.recipe.model.class_name}: layouts beside one device", title_justify="left")
    table.add_column("layout")
    table.add_column("ranks", justify="right")
    for name in ERRORS:
        table.add_column(name.removesuffix("_error").replace("_", " "), justify="right")
    table.add_column("")
    table.add_column("s", justify="right")
    for layout in result.layouts:
        errors = [_cell(layout.errors.get(name), result.bounds[name]) for name in ERRORS]
        style = STYLES[layout.status]
        table.add_row(
            layout.layout, str(layout.ranks), *errors, f"[{style}]{layout.status}[/]", f"{layout.seconds:.1f}"
        )
    bounds = [f"{result.bounds[name]:.0e}" for name in ERRORS]
    table.add_section()
    table.add_row("bound", "", *bounds, "", "")
    return table


def _cell(error: float | None, bound: float) -> str:
    if error is None:
        return ""
    return f"{error:.0e}" if error <= bound else f"[bold red]{error:.0e}[/]"


def _explain(console: Console, layout: "LayoutResult") -> None:
    console.print(f"{layout.layout}: {layout.status}", style=STYLES[layout.status], markup=False)
    console.print(f"  {layout.reason}", markup=False)
    first = layout.first_difference
    if first is not None:
        ratio = "" if first.ratio is None else f", with {first.ratio:.4g} times its norm"
        console.print(
            f"  first to differ, of {first.parameters}: {first.parameter} in {first.module}: {first.quantity} is "
            f"{first.error:.1e} off{ratio}",
            markup=False,
        )
