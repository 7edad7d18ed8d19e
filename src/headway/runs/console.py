"""What a person sees of a run: a live bar on a terminal, plain lines anywhere else, and a summary at the end."""

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headway.runs.comparison import Compared, Comparison
from headway.runs.summary import RunSummary

PLAIN_WIDTH = 240
"""Columns of a file or a pipe: paths stay whole, so that they can be copied."""

STYLES = {"info": "cyan", "good": "green", "warning": "yellow", "error": "bold red"}

EVENT_STYLES = {
    "resumed": "good",
    "finished": "good",
    "checkpoint_saved": "good",
    "profiled": "good",
    "checkpoint_failed": "error",
    "checkpoint_damaged": "warning",
    "checkpoint_not_removed": "warning",
    "stopped": "warning",
    "step_skipped": "warning",
    "bad_records": "warning",
    "data_changed": "warning",
    "recipe_changed": "warning",
    "samples_not_saved": "warning",
    "prediction_failed": "warning",
    "prediction_late": "warning",
    "profile_given_up": "warning",
    "profile_left_out": "warning",
    "profile_not_written": "warning",
    "writer_given_up": "warning",
}


class RunConsole:
    """Shows a run's steps and messages; on ranks other than 0 it shows nothing.

    ``sample_name`` names what a sample is (images, videos, conversations …); ``console`` stands in for standard output.
    ``close`` gives the terminal back; it may be called twice.
    """

    def __init__(
        self,
        total_steps: int,
        rank: int = 0,
        sample_name: str = "samples",
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(quiet=rank != 0)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH
        self._live = rank == 0 and _is_watched(self._console)
        self._total = total_steps
        self._sample_name = sample_name
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("[progress.percentage]{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total_steps, start=False)
        self._numbers = Text("")
        self._display = Live(console=self._console, get_renderable=self._picture, refresh_per_second=4, transient=True)

    def start(self, next_step: int) -> None:
        """Show the bar, at the first step that this session takes."""
        self._bar.update(self._task, completed=next_step)
        self._bar.start_task(self._task)
        if self._live:
            self._display.start()

    def close(self) -> None:
        """Take the bar away and give the terminal back."""
        if self._live:
            self._display.stop()

    def title(self, lines: Mapping[str, str]) -> None:
        """Say once what runs: a name and a value a line (model, parameters, data, layout, directory …)."""
        width = max(map(len, lines), default=0)
        for name, value in lines.items():
            self._console.print(f"[bold]{escape(name):<{width}}[/]  {escape(value)}", highlight=False)

    def message(self, text: str, style: str = "info") -> None:
        """Print something worth a person's eye, above the bar. ``style``: info, good, warning or error."""
        mark = {"warning": "warning: ", "error": "error: "}.get(style, "")
        self._console.print(Text(mark + text, style=STYLES[style]), soft_wrap=True)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event of the run that is worth a person's eye; the rest is in ``events.jsonl``."""
        text = fields.get("message") or _event_text(kind, fields, self._sample_name)
        if text:
            self.message(text, EVENT_STYLES.get(kind, "info"))

    def step(self, steps_done: int) -> None:
        """Move the bar; cheap enough for every step."""
        self._bar.update(self._task, completed=steps_done)

    def training(self, line: Mapping[str, Any]) -> None:
        """Show a training line of ``metrics.jsonl`` (``step`` counts from 0)."""
        done = line["step"] + 1
        self.step(done)
        parts = _parts(line, self._sample_name)
        if self._live:
            self._numbers = Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
        else:
            left = self._bar.tasks[self._task].time_remaining
            time_left = [] if left is None or done >= self._total else [f"left {_duration(left)}"]
            self._console.print(
                "  ".join([f"step {done}/{self._total}", *parts, *time_left]), highlight=False, markup=False
            )

    def validation(self, steps_done: int, loss: float) -> None:
        """Show a validation loss measured after ``steps_done`` steps."""
        self.message(f"validation loss {loss:.4f} after {steps_done} steps")

    def summary(self, summary: RunSummary, paths: Mapping[str, str], title: str = "The run") -> None:
        """Print the table that a run ends with: what it came to, and where its results lie."""
        self.close()
        table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _summary_rows(summary, self._sample_name):
            table.add_row(name, value)
        for name, path in paths.items():
            table.add_row(name, escape(path))
        self._console.print(table, highlight=False)

    def comparison(self, comparison: Comparison) -> None:
        """Print what was predicted beside what was measured."""
        self.close()
        lines = comparison.measured.lines
        title = f"Predicted on {comparison.cluster} beside measured (median of {lines} lines after warm-up)"
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column(style="bold", no_wrap=True)
        for heading in ("predicted", "range", "measured", "error", "in range"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in comparison.rows:
            ends = f"{_quantity(row, row.low)} to {_quantity(row, row.high)}"
            cells = [_quantity(row, row.predicted), ends, _quantity(row, row.measured), f"{row.error:+.1%}"]
            table.add_row(row.name, *cells, "yes" if row.within else "no")
        self._console.print(table, highlight=False)

    def _picture(self) -> Group:
        return Group(self._bar, self._numbers)


def _event_text(kind: str, fields: Mapping[str, Any], sample_name: str) -> str:
    """Words for events that carry no message of their own; "" for those that need no eye."""
    match kind:
        case "bad_records":
            records = fields["records"]
            more = f" and {len(records) - 1} more (events.jsonl names them)" if len(records) > 1 else ""
            return f"corrupt record in step {fields['step']}, not counted: {records[0]}{more}"
        case "step_skipped":
            first, end = fields["positions_of_step"]
            return (
                f"step {fields['step']} skipped, {fields['reason']}: loss {fields['loss']:.4g}, "
                f"gradient norm {fields['grad_norm']:.4g}; {sample_name} {first} to {end - 1} of the data's order "
                "(events.jsonl has more)"
            )
        case "sampled":
            return f"samples in {fields['file']}"
    return ""


def _is_watched(console: Console) -> bool:
    """A terminal that a person watches: not a file, a CI log, a dumb terminal or one that asked for no colours."""
    plain = any(os.environ.get(name) for name in ("CI", "NO_COLOR"))
    return console.is_terminal and not console.is_dumb_terminal and not plain


def _parts(line: Mapping[str, Any], sample_name: str) -> list[str]:
    """The known numbers of a training line, the ones a person looks for first."""
    shown = [f"loss {_known(line, 'loss', '.4f')}", f"grad norm {_known(line, 'grad_norm', '.3g')}"]
    if line.get("lr") is not None:
        shown.append(f"lr {line['lr']:.2e}")
    shown += _speed(line, sample_name)
    if line.get("peak_memory_gib") is not None:
        shown.append(f"{line['peak_memory_gib']:.2f} GiB")
    if line.get("data_wait_s") is not None and line.get("step_time_s"):
        shown.append(f"data wait {line['data_wait_s'] / line['step_time_s']:.0%}")
    return shown


def _speed(line: Mapping[str, Any], sample_name: str) -> list[str]:
    shown = []
    if line.get("tokens_per_s"):
        shown.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    if line.get("samples_per_s") is not None:
        shown.append(f"{_rate(line['samples_per_s'])} {sample_name}/s")
    if line.get("mfu") is not None:
        shown.append(f"MFU {line['mfu']:.1%}")
    elif line.get("tflops_per_device") is not None:
        shown.append(f"{line['tflops_per_device']:.3g} TFLOP/s")
    return shown


def _quantity(row: Compared, value: float) -> str:
    return f"{value:.1%}" if row.name == "MFU" else f"{value:.4g} {row.unit}".rstrip()


def _known(line: Mapping[str, Any], key: str, form: str) -> str:
    value = line.get(key)
    return "-" if value is None else f"{value:{form}}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _summary_rows(summary: RunSummary, sample_name: str) -> list[tuple[str, str]]:
    rows = [("steps", f"{summary.steps:,}")]
    if summary.samples is not None:
        rows.append((f"{sample_name} seen", f"{summary.samples:,}"))
    rows += _change("training loss", summary.loss_first, summary.loss_last)
    rows += _change("validation loss", summary.validation_first, summary.validation_last)
    rows += [
        (name, text.format(value))
        for name, text, value in (
            (f"{sample_name}/s", "{:,.1f} (median)", summary.samples_per_s),
            ("tokens/s", "{:,.0f} (median)", summary.tokens_per_s),
            ("TFLOP/s a device", "{:.3g} (median)", summary.tflops_per_device),
            ("MFU", "{:.1%} (median)", summary.mfu),
            ("HFU", "{:.1%} (median)", summary.hfu),
            ("waiting for data", "{:.1%} of the time", summary.data_wait_share),
            ("peak memory", "{:.2f} GiB a rank", summary.peak_memory_gib),
            ("skipped steps", "{}", summary.skipped_steps or None),
            ("bad records", "{}", summary.bad_records or None),
        )
        if value is not None
    ]
    return rows


def _change(name: str, first: float | None, last: float | None) -> list[tuple[str, str]]:
    return [] if first is None or last is None else [(name, f"{first:.4f} -> {last:.4f}")]
