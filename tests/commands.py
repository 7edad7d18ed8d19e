"""The command line within a test's own process."""

import sys
from pathlib import Path

import pytest

from headway.cli import main as cli
from headway.recipe import to_toml
from tiny_recipes import text_file, text_recipe


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``headway ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def recipe_file(folder: Path) -> str:
    """A small language model on a small text."""
    file = folder / "recipe.toml"
    file.write_text(to_toml(text_recipe(text_file(folder / "text.jsonl"), folder / "run")))
    return str(file)
