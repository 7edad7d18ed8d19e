"""The recipe's paths: a file, a folder, a glob, or numbered shards like ``train-{000..007}.tar``."""

import difflib
import glob
import os
import re
from itertools import product
from pathlib import Path

from headway.errors import UserError


def existing_folder(path: Path, key: str) -> Path:
    """``path``, when it is a folder. Raises UserError with what is spelled nearly the same when it is not there."""
    if path.is_dir():
        return _readable(path, key)
    if path.exists():
        raise UserError(f"{key} = {path} is a file; name a folder")
    raise UserError(f"{key} = {path} does not exist{near_paths(path)}")


def existing_files(path: Path, key: str, suffix: str) -> list[Path]:
    """The files that ``path`` stands for: itself, a folder's and its folders' files ending in ``suffix``, or those that
    fit a pattern (``*``, ``?``, ``[ab]``, ``{a,b}``, ``{000..007}``). Ordered by name.

    Raises UserError when there are none, and when one can't be read or, spelled out by a range or list, is missing.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob(f"*{suffix}") if file.is_file())
        if not files:
            raise UserError(f"{key} = {path} holds no file ending in {suffix}")
        return [_readable(file, key) for file in files]
    files = []
    for name in [str(path)] if path.exists() else expand_braces(str(path)):
        matches = (
            [Path(name)]
            if Path(name).is_file()
            else [Path(match) for match in glob.glob(name, recursive=True) if os.path.isfile(match)]
        )
        if not matches:
            raise UserError(f"{key} = {path}: {name} does not exist{near_paths(Path(name))}")
        files.extend(matches)
    return sorted({_readable(file, key) for file in files})


def expand_braces(text: str) -> list[str]:
    """Every string that ``{a,b}`` and ``{000..007}`` in ``text`` stand for; numbers keep their leading zeros."""
    parts = re.split(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}", text)
    choices = [[part] if place % 2 == 0 else _alternatives(part) for place, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def near_paths(path: Path) -> str:
    """What stands beside a missing path and is spelled nearly the same; or the part of the path that exists."""
    parent = path.parent
    if not parent.is_dir():
        existing = next(folder for folder in path.absolute().parents if folder.is_dir())
        return f" (the part that does is {existing})"
    near = difflib.get_close_matches(path.name, sorted(entry.name for entry in parent.iterdir()), n=3, cutoff=0.4)
    return f"; near ones: {', '.join(str(parent / name) for name in near)}" if near else ""


def _readable(path: Path, key: str) -> Path:
    if not os.access(path, os.R_OK):
        raise UserError(f"{key}: this user may not read {path}")
    return path


def _alternatives(inside: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
