"""Lines of trainers. Where each format is printed:

torchtitan ``components/metrics.py``, ``components/checkpoint.py``, ``tools/utils.py``; Megatron-LM
``training/training.py`` (``training_log``); DeepSpeed ``utils/timer.py`` (ThroughputTimer), ``runtime/pipe/engine.py``;
transformers ``trainer_callback.py`` (PrinterCallback, ProgressCallback) and ``trainer_state.json``; Lightning
``callbacks/progress/tqdm_progress.py``.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from headway.explain.logs.series import Happening, Note, Row

NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_LONGEST_LINE = 20_000

Values = dict[str, float]
Parsed = tuple[int | None, Values]
"""The step, None where the line tells none, and the values."""


def _torchtitan(line: str) -> Parsed | None:
    if not (step := re.search(r"(?<!validate )\bstep:\s*(\d+)\s+loss:", line)):
        return None
    return int(step[1]), _found(
        line,
        loss=rf"\bloss:\s*{NUMBER}",
        grad_norm=rf"grad_norm:\s*{NUMBER}",
        memory_gib=rf"memory:\s*{NUMBER}GiB",
        memory_percent=rf"GiB\({NUMBER}%\)",
        tokens_per_s=rf"\btps:\s*{NUMBER}",
    )


def _megatron(line: str) -> Parsed | None:
    if not (step := re.search(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|", line)):
        return None
    values = _found(
        line,
        step_ms=rf"elapsed time per iteration \(ms\):\s*{NUMBER}",
        loss=rf"\b(?:lm )?loss:\s*{NUMBER}",
        grad_norm=rf"grad norm:\s*{NUMBER}",
        batch=rf"glob\w+ batch size:\s*{NUMBER}",
        skipped=rf"number of skipped\s+iterations:\s*{NUMBER}",
        nan=rf"number of nan\s+iterations:\s*{NUMBER}",
    )
    if "step_ms" in values:
        values["step_s"] = values.pop("step_ms") / 1000
    return int(step[1]), values


def _deepspeed(line: str) -> Parsed | None:
    if step := re.search(r"\bglobal_step=(\d+)", line):
        # CurrSamplesPerSec is of the last step, whose line may be one of many.
        return int(step[1]), _found(
            line, samples_per_s=rf"CurrSamplesPerSec={NUMBER}", memory_gib=rf"MaxMemAllocated={NUMBER}GB"
        )
    if step := re.search(r"\bsteps: (\d+) loss:", line):
        return int(step[1]), _found(
            line,
            loss=rf"\bloss:\s*{NUMBER}",
            step_s=rf"iter time \(s\):\s*{NUMBER}",
            samples_per_s=rf"samples/sec:\s*{NUMBER}",
        )
    return None


def _lightning(line: str) -> Parsed | None:
    if not (bar := re.search(r"Epoch (\d+):.*?\b(\d+)/(\d+) \[", line)):
        return None
    values = _found(
        line, loss=rf"\b(?:train_)?loss(?:_step)?={NUMBER}", per_second=rf"{NUMBER}it/s", each=rf"{NUMBER}s/it"
    )
    per_second, each = values.pop("per_second", 0.0), values.pop("each", None)
    if each is not None or per_second > 0:
        values["step_s"] = each if each is not None else 1 / per_second
    return int(bar[1]) * int(bar[3]) + int(bar[2]), values


def _hugging_face(line: str) -> Parsed | None:
    text = line[line.find("{") :] if "{" in line else ""
    if not re.match(r"\{'(loss|grad_norm|learning_rate|eval_loss)':", text) or "'eval_loss'" in text:
        return None
    values = _found(text, loss=rf"'loss': '?{NUMBER}", grad_norm=rf"'grad_norm': '?{NUMBER}")
    values |= _found(text, tokens_per_s=rf"'(?:train_)?tokens_per_second\w*': '?{NUMBER}")
    return (None, values) if values else None


def _json_line(line: str) -> Parsed | None:
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return of_fields(fields) if isinstance(fields, dict) else None


def of_fields(fields: Mapping[str, Any]) -> Parsed | None:
    """Step and values of a table of a step under the names that are in use; None without a step."""
    step = next((fields[key] for key in ("step", "global_step", "iteration", "iter") if key in fields), None)
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**60:
        return None
    values: Values = {}
    for name, keys in _KEYS.items():
        for key in keys:
            number = _number(fields.get(key))
            if number is not None:
                values[name] = number
                break
    non_finite = fields.get("non_finite")
    for name in non_finite if isinstance(non_finite, dict) else ():
        values[name] = float("nan")
    return step, values


_KEYS = {
    "loss": ("loss", "train_loss", "train/loss", "lm_loss", "train_loss_step"),
    "grad_norm": ("grad_norm", "gradient_norm", "train/grad_norm"),
    "step_s": ("step_time_s", "step_time", "time_per_step", "iteration_time", "time/step"),
    "data_wait_s": ("data_wait_s", "data_time"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tps", "tokens_per_second"),
    "samples_per_s": ("samples_per_s", "samples_per_sec", "samples_per_second"),
    "memory_gib": ("peak_memory_gib", "memory_gib", "max_memory_gib"),
}
_FORMATS: tuple[tuple[str, Callable[[str], Parsed | None]], ...] = (
    ("torchtitan", _torchtitan),
    ("Megatron-LM", _megatron),
    ("DeepSpeed", _deepspeed),
    ("Lightning", _lightning),
    ("Hugging Face Trainer", _hugging_face),
    ("JSON lines", _json_line),
)
_NOTES: tuple[tuple[Happening, re.Pattern[str]], ...] = (
    (Happening.OUT_OF_MEMORY, re.compile(r"OutOfMemoryError|CUDA out of memory", re.I)),
    (
        Happening.COLLECTIVE_TIMEOUT,
        re.compile(r"Watchdog caught collective operation timeout|collective.*timed? ?out", re.I),
    ),
    (
        Happening.ALLOCATION_RETRY,
        re.compile(r"[1-9]\d* CUDA memory allocation retries|pytorch allocator cache flushes", re.I),
    ),
    (Happening.GARBAGE_COLLECTION, re.compile(r"\[GC\]|garbage collection", re.I)),
    (
        Happening.CHECKPOINT,
        re.compile(r"sav(ed|ing)\b.{0,20}\b(checkpoint|model checkpoint|model state)|checkpoint.{0,40}\bsaved\b", re.I),
    ),
    (
        Happening.RESTART,
        re.compile(r"load(ed|ing)\b.{0,30}\bcheckpoint\b|resum(ed|ing)\b.{0,40}(step|checkpoint|iteration)", re.I),
    ),
    (
        Happening.VALIDATION,
        re.compile(r"validate step|validation loss|\beval_loss\b|evaluating|Running Evaluation", re.I),
    ),
)
_SECONDS = re.compile(rf"(?:in|took) {NUMBER} ?s(?:ec|econds?)?\b", re.I)


def parse(lines: Iterable[str]) -> tuple[str, list[Row], list[Note]]:
    """The trainer whose format most lines have, rows, and notes. Lines of no format are passed over."""
    rows: list[Row] = []
    notes: list[Note] = []
    counted: Counter[str] = Counter()
    bar = 0
    for number, raw in enumerate(lines, 1):
        line = _ANSI.sub("", raw[:_LONGEST_LINE])
        if progress := re.search(r"(\d+)/\d+ \[\d+:\d\d", line):
            bar = int(progress[1])
        for name, read in _FORMATS:
            if (parsed := read(line)) is not None:
                counted[name] += 1
                # Hugging Face's lines tell no step: the progress bar beside them does, else their order.
                step = parsed[0] if parsed[0] is not None else max(bar, rows[-1].step + 1 if rows else 1)
                _add(rows, Row(number, step, parsed[1], _stamp(line)))
                break
        else:
            what = next((what for what, pattern in _NOTES if pattern.search(line)), None)
            if what is not None:
                took = _SECONDS.search(line)
                seconds = _number(took[1]) if took else None
                notes.append(Note(number, what, line.strip()[:200], rows[-1].step if rows else -1, seconds))
    trainer = counted.most_common(1)[0][0] if counted else ""
    return trainer, rows, notes


def _add(rows: list[Row], row: Row) -> None:
    """DeepSpeed and progress bars tell of one step in several lines: they become one row."""
    if rows and rows[-1].step == row.step:
        before = rows.pop()
        row = Row(before.line, row.step, {**before.values, **row.values}, row.stamp_s or before.stamp_s)
    rows.append(row)


def _found(line: str, **patterns: str) -> Values:
    values = {}
    for name, pattern in patterns.items():
        if (match := re.search(pattern, line, re.I)) and (number := _number(match[1])) is not None:
            values[name] = number
    return values


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _stamp(line: str) -> float | None:
    found = _STAMP.search(line)
    if found is None:
        return None
    try:
        whole = datetime.strptime(f"{found[1]} {found[2]}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return (whole - datetime(2000, 1, 1)).total_seconds() + float(f"0.{found[3] or 0}")
