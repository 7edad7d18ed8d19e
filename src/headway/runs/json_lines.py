"""JSON lines that survive a killed writer and a full disk: one object a line, appended whole or not at all."""

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import RunFailed, UserError

_appending = threading.Lock()


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
    """Append one line, as a rule with one write, so that a killed process tears at most the last line.

    Raises RunFailed when the disk does not take it; what was written of it is taken back. Threads may append at once.
    """
    with writing(path), _appending:
        # A file name that is no UTF-8 becomes an escape of JSON's own.
        rest = encode_line(fields).encode(errors="backslashreplace")
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of ``path`` (none when it does not exist). A torn last line is left out.

    Raises UserError when the file can't be read, and one naming the line when a line before the last is damaged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    # Not splitlines: texts may hold line breaks of Unicode, which JSON leaves as they are.
    whole = text.split("\n")[:-1]
    return [_decode(path, number, line) for number, line in enumerate(whole, 1) if line.strip()]


def _decode(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("an object was expected")
    except ValueError as error:
        raise UserError(f"{path}:{number}: not a line of JSON ({error}): mend or delete the line") from None
    return fields


def drop_torn_line(path: Path) -> None:
    """Cut off what stands after the last line break. Needs no room on the disk. Raises RunFailed."""
    if not path.exists():
        return
    with writing(path):
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the lines that ``keep`` refuses, by an atomic rename. Raises RunFailed."""
    lines = read_lines(path)
    kept = [line for line in lines if keep(line)]
    if len(kept) < len(lines):
        replace_text(path, "".join(encode_line(line) for line in kept))


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, flush it to disk and rename it: a reader sees the old or the new whole.

    Raises RunFailed, leaving the old.
    """
    beside = path.with_name(path.name + ".new")
    with writing(path):
        with beside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's error inside into RunFailed: what can't be written, what is missing, how to go on."""
    try:
        yield
    except Exception as error:
        # Libraries written in Rust pass on what the system says in exceptions of their own.
        if not isinstance(error, OSError) and "(os error" not in str(error):
            raise
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise RunFailed(
            f"{path} can't be written: {reason} ({free:,} bytes are free there). Mend that and start "
            "the run again: it goes on from the newest checkpoint"
        ) from error
