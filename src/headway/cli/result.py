"""A command's result, for a person or as JSON."""

import json
from pathlib import Path
from typing import Any

import typer


def give_result(result: dict[str, Any], text: str, json_path: str | None) -> None:
    """Print ``text``; with ``json_path`` write ``result`` there as JSON instead, ``-`` being standard output."""
    if json_path is None:
        typer.echo(text)
    elif json_path == "-":
        typer.echo(json.dumps(result, indent=1))
    else:
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
