"""A command's result, for a person or as JSON."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.errors import UserError


def can_be_written(path: Path | None, parameter: typer.CallbackParam) -> Path | None:
    """Raise UserError for a file that can't be written, before a command's work and not after it."""
    if path is not None:
        target = path if path.exists() else path.parent
        if path.is_dir() or not os.access(target, os.W_OK):
            raise UserError(
                f"{parameter.opts[-1]} {path} can't be written: name a file in a folder that this user may write to"
            )
    return path


def is_cluster_file(path: Path | None, parameter: typer.CallbackParam) -> Path | None:
    """As ``can_be_written``, of a file whose name says that it is a cluster."""
    if path is not None and path.suffix != ".toml":
        option = parameter.opts[-1]
        raise UserError(f"{option} {path}: a cluster file ends in .toml, by which --cluster knows it from a name")
    return can_be_written(path, parameter)


def _json_can_be_written(path: str | None, parameter: typer.CallbackParam) -> str | None:
    if path is not None and path != "-":
        can_be_written(Path(path), parameter)
    return path


JsonPath = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write JSON; - prints it.", callback=_json_can_be_written),
]


def write_or_tell(path: Path, write: Callable[[Path], object]) -> None:
    """Raises UserError when the disk does not take what ``write`` writes to ``path``."""
    try:
        write(path)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from None


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
