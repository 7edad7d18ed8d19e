"""``headway validate``: predictions of measured runs, and how far they are off."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.result import JsonPath, give_result

if TYPE_CHECKING:
    from headway.plan import Errors, Summary, Validation

WIDTH = 120
"""Columns that the table needs."""
LONGEST_NAME = 44


def validate(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="A table of measured runs, one row a run.")],
    json_: JsonPath = None,
) -> None:
    """Predict measured runs from model, layout and hardware, and tell how far the predictions are off.

    Example: headway validate measured_runs.csv --json result.json

    Each row is mapped without a look at what it measured; a row that can't be mapped is counted with the reason.
    No constant belongs to a row or a model, but some choices for whole frameworks were made with published runs of
    theirs in sight (docs/published_runs.md): errors of those runs are no forecast of yours. Coverage is the share of
    measurements inside the 80 % range; regret the time lost by trusting the predicted best of rows that differ in
    their layout only.
    """
    from headway.plan import read_runs
    from headway.plan import validate as validate_runs

    result = validate_runs(read_runs(runs))
    give_result(result.as_json(), _rendered(result), json_)


def _rendered(result: "Validation") -> str:
    console = Console(highlight=False, width=max(WIDTH, shutil.get_terminal_size().columns))
    with console.capture() as capture:
        console.print(_table(result))
        mapped = sum(not row.reason for row in result.rows)
        console.print(f"{mapped} of {len(result.rows)} rows mapped, each without a look at what it measured")
        for reason, count in sorted(result.reasons().items(), key=lambda item: -item[1]):
            console.print(f"  {count} not mapped: {reason}", markup=False)
    return capture.get().rstrip("\n")


def _table(result: "Validation") -> Table:
    table = Table(title="Predicted beside measured: percent of what was measured", title_justify="left")
    table.add_column("source", no_wrap=True)
    for name in ("rows", "mean |error|", "median", "bias", "P90", "coverage", "regret", "memory: rows", "|error|"):
        table.add_column(name, justify="right")
    for name, summary in result.by_source().items():
        table.add_row(*_cells(_short(name), summary))
    table.add_section()
    for name, summary in result.by_kind().items():
        table.add_row(*_cells(name, summary))
    table.add_section()
    table.add_row(*_cells("all", result.overall), style="bold")
    return table


def _cells(name: str, summary: "Summary") -> list[str]:
    regret = f"{summary.regret.mean_percent:.1f}" if summary.regret else ""
    memory = [str(summary.memory.rows), f"{summary.memory.mean_absolute_percent:.1f}"] if summary.memory else ["", ""]
    return [name, *_errors(summary.time), regret, *memory]


def _errors(errors: "Errors | None") -> list[str]:
    if errors is None:
        return [""] * 6
    percent = (errors.mean_absolute_percent, errors.median)
    return [
        str(errors.rows),
        *(f"{number:.1f}" for number in percent),
        f"{errors.bias:+.1f}",
        f"{errors.p90:.1f}",
        f"{100 * errors.coverage:.0f} %",
    ]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
