"""A log file as a Series: text that a trainer printed, JSON lines, or the history in a ``trainer_state.json``."""

import json
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.explain.logs.formats import of_fields, parse
from headway.explain.logs.series import Row, Series

LARGEST_BYTES = 1 << 30


def read_log(path: Path) -> Series:
    """Read one log. Raises UserError when it can't be read or tells of no step."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UserError(f"{path}: larger than {LARGEST_BYTES >> 30} GiB: cut out the part that is of interest")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if text.lstrip().startswith("{") and '"log_history"' in text:
        return Series(path, "Hugging Face Trainer", _history(path, text), [])
    trainer, rows, notes = parse(text.splitlines())
    if not rows and not notes:
        raise UserError(
            f"{path}: no line tells of a step in the format of torchtitan, Megatron-LM, DeepSpeed, Hugging Face "
            "Trainer, Lightning, or JSON lines"
        )
    return Series(path, trainer, rows, notes)


def _history(path: Path, text: str) -> list[Row]:
    try:
        history: Any = json.loads(text)["log_history"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not whole JSON: the file is damaged") from None
    rows = []
    for number, fields in enumerate(history if isinstance(history, list) else [], 1):
        if isinstance(fields, dict) and "loss" in fields and (parsed := of_fields(fields)) and parsed[0] is not None:
            rows.append(Row(number, parsed[0], parsed[1]))
    if not rows:
        raise UserError(f"{path}: its log_history tells of no training step")
    return rows
