"""``headway explain``: where the time of a run went, why, and the one change worth most."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.cli.result import JsonPath, can_be_written, give_result, write_or_tell

if TYPE_CHECKING:
    from headway.explain import Comparison, Finding, Report

WIDTH = 120
"""Columns that the tables need."""
ROWS = 16
"""Of the table of ranks on a terminal; all are in the JSON."""
FINDINGS = 8
"""Told on a terminal; all are in the JSON."""
CAUSES = 8
"""Of a difference to the prediction, told on a terminal."""
MESSAGES = 12
"""Of health, told on a terminal."""
COLOURS = {"failed": "red", "warning": "yellow", "note": "dim"}


def explain(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH…", help="Traces, dumps, snapshots, logs, tables, runs, or folders of them."),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="PATH", help="A second run: what became longer or shorter in it, and why."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write a page with budgets, lanes and findings.", callback=can_be_written),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Write all ranks on one clock, with the findings, for Perfetto.",
            callback=can_be_written,
        ),
    ] = None,
    json_: JsonPath = None,
) -> None:
    """Explain where the time of a run went, and rank what would win it back.

    Example: headway explain traces/ --json report.json

    What each file is, is told by its content. Health comes first: what can't be believed is said to be inconclusive.
    Gains are replays of the measured work with one cause removed, with bounds.
    """
    from headway.explain import compare, write_page, write_perfetto
    from headway.explain import explain as explain_paths

    report = explain_paths(paths)
    result, text = report.as_json(), rendered(report)
    if against:
        comparison = compare(report, explain_paths(against))
        result["comparison"] = comparison.as_json()
        text += "\n" + _compared(comparison)
    if html is not None:
        write_or_tell(html, lambda path: write_page(report, path))
    if perfetto is not None:
        write_or_tell(perfetto, lambda path: write_perfetto(report, path))
    give_result(result, text, json_)


def rendered(report: "Report") -> str:
    """What there is to know, as text for this terminal."""
    console = Console(highlight=False, width=max(WIDTH, shutil.get_terminal_size().columns))
    result = report.as_json()
    with console.capture() as capture:
        kinds = [one["kind"] for one in result["inputs"]]
        counted = ", ".join(f"{kinds.count(kind)} {kind.replace('_', ' ')}" for kind in dict.fromkeys(kinds))
        console.print(f"[bold]{counted}[/] · health: {report.verdict}")
        messages = result["health"]["messages"]
        for message in messages[:MESSAGES]:
            where = f"rank {', '.join(map(str, message['ranks'][:8]))}: " if message["ranks"] else ""
            colour = COLOURS[message["severity"]]
            console.print(f"  [{colour}]{message['severity']}[/] {where}{escape(message['text'])}")
        if len(messages) > MESSAGES:
            console.print(f"  … and {len(messages) - MESSAGES} more, in the JSON")
        if result["ranks"]:
            console.print(_budget(result["ranks"]))
        for planned in result.get("planned", []):
            console.print(_planned(planned))
        for number, finding in enumerate(report.explained.findings[:FINDINGS], 1):
            _print_finding(console, number, finding)
        if len(report.explained.findings) > FINDINGS:
            console.print(f"… and {len(report.explained.findings) - FINDINGS} more findings, in the JSON")
        if not report.explained.findings:
            console.print(
                "no finding: nothing that is known to waste time does so here"
                if report.verdict != "inconclusive"
                else "inconclusive: the messages above say why"
            )
    return capture.get().rstrip("\n")


def _budget(ranks: list[dict[str, Any]]) -> Table:
    table = Table(title="where the time of each rank went, ms", title_justify="left", box=None)
    for heading in ("rank", "window", "busy", "compute", "communication", "exposed", "copies", "idle", "most idle by"):
        table.add_column(heading, justify="left" if heading == "most idle by" else "right")
    for rank in ranks[:ROWS]:
        causes = rank.get("idle_by_cause_us") or {}
        cause = max(causes, key=lambda name: causes[name], default="")
        window = max(rank["window_us"], 1e-9)
        table.add_row(
            str(rank["rank"]),
            f"{rank['window_us'] / 1000:,.1f}",
            *(
                f"{rank[key] / 1000:,.1f} ({rank[key] / window:4.0%})"
                for key in (
                    "busy_us",
                    "compute_us",
                    "communication_us",
                    "exposed_communication_us",
                    "memory_us",
                    "idle_us",
                )
            ),
            f"{cause.replace('_', ' ')} {causes[cause] / window:.0%}" if cause else "",
        )
    if len(ranks) > ROWS:
        table.add_row("…", f"{len(ranks) - ROWS} more")
    return table


def _planned(planned: dict[str, Any]) -> Table:
    """Predicted against measured, the causes that changed most."""
    table = Table(title=f"{planned['text'].partition(':')[0]} (with the profiler), ms a step", box=None)
    table.title_justify = "left"
    for heading in ("cause", "planned", "measured", "change", "where"):
        table.add_column(heading, justify="left" if heading in ("cause", "where") else "right")
    for cause in planned["causes"][:CAUSES]:
        numbers = (cause["planned_us"], cause["measured_us"])
        change = f"{cause['change_us'] / 1000:+,.1f}"
        table.add_row(cause["cause"], *(f"{us / 1000:,.1f}" for us in numbers), change, cause["where"])
    return table


def _print_finding(console: Console, number: int, finding: "Finding") -> None:
    gain = finding.recoverable
    told = (
        f"{gain.low_us / 1000:,.1f} to {gain.high_us / 1000:,.1f} ms, {gain.share:.1%}"
        if gain is not None
        else "no time"
    )
    console.print(f"\n[bold]{number}. {escape(finding.title)}[/] · {told} · confidence {finding.confidence.value}")
    console.print(f"   {escape(finding.claim)}")
    overrides = " ".join(f"--set {key}={_toml(value)}" for key, value in finding.fix.recipe.items())
    console.print(f"   [green]fix:[/] {escape(finding.fix.text)} {escape(overrides)}".rstrip())
    console.print(f"   [dim]verify: {escape(finding.verify)}[/]")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _compared(comparison: "Comparison") -> str:
    console = Console(highlight=False, width=max(WIDTH, shutil.get_terminal_size().columns))
    with console.capture() as capture:
        console.print(f"\n[bold]against the second run:[/] {escape(comparison.text)}")
        table = Table(box=None)
        for heading in ("cause", "first, ms a step", "second, ms a step", "change, ms", "beyond the spread"):
            table.add_column(heading, justify="left" if heading == "cause" else "right")
        for cause in comparison.causes:
            table.add_row(
                cause.name.replace("_", " "),
                f"{cause.before_us / 1000:,.2f}",
                f"{cause.after_us / 1000:,.2f}",
                f"{cause.change_us / 1000:+,.2f}",
                "yes" if cause.is_beyond_spread else "no",
            )
        console.print(table)
    return capture.get().rstrip("\n")
