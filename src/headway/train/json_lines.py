"""JSON lines that survive a killed writer: one object a line, appended whole, a torn last line ignored and repaired."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def encode_line(fields: Mapping[str, Any]) -> str:
    """``fields`` as one line of strict JSON, newline included.

    JSON has no NaN: a non-finite float becomes null, and ``non_finite`` names its key and what it was
    (``{"loss": null, "non_finite": {"loss": "nan"}}``).
    """
    non_finite: dict[str, str] = {}
    encoded = {key: _finite(value, key, non_finite) for key, value in fields.items()}
    if non_finite:
        encoded["non_finite"] = non_finite
    return json.dumps(encoded, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any, key: str, non_finite: dict[str, str]) -> Any:
    match value:
        case float() if not math.isfinite(value):
            non_finite[key] = str(value)
            return None
        case dict():
            return {name: _finite(item, f"{key}.{name}", non_finite) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item, f"{key}.{index}", non_finite) for index, item in enumerate(value)]
    return value


def append_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Append one line with one write, so that a killed process tears at most the last line."""
    line = encode_line(fields).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of ``path`` (none when it does not exist). A torn last line is left out.

    Raises ValueError naming the line when a line before the last is damaged.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    return [_decode(path, number, line) for number, line in enumerate(whole.splitlines(), 1) if line.strip()]


def _decode(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not a JSON line: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}:{number}: a JSON object was expected")
    return fields


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drop the lines that ``keep`` refuses and a torn last line, by an atomic rename; returns how many it refused."""
    if not path.exists():
        return 0
    lines = read_lines(path)
    kept = [line for line in lines if keep(line)]
    replace_text(path, "".join(encode_line(line) for line in kept))
    return len(lines) - len(kept)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, flush it to disk and rename it: a reader sees the old or the new whole."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
