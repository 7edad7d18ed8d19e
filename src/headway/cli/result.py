"""A command's result, for a person or as JSON."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.errors import UserError


def _can_be_written(path: str | None) -> str | None:
    """Raise UserError before a command's work, not after it."""
    if path is not None and path != "-":
        target = path if os.path.exists(path) else os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.access(target, os.W_OK):
            raise UserError(f"--json {path} can't be written: name a file in a folder that this user may write to")
    return path


JsonPath = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write JSON; - prints it.", callback=_can_be_written),
]


def give_result(result: dict[str, Any], text: str, json_path: str | None) -> None:
    """Print ``text``; with ``json_path`` write ``result`` there as JSON instead, ``-`` being standard output.

    Raises UserError when the disk does not take it.
    """
    if json_path is None:
        typer.echo(text)
    elif json_path == "-":
        typer.echo(json.dumps(result, indent=1))
    else:
        try:
            Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{text}\n--json {json_path} can't be written: {error.strerror}") from None
