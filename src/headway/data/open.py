"""From the recipe's data section to the training and validation sources."""

import difflib
from pathlib import Path

from headway.data.folders import ImageFolder
from headway.data.images import image_size
from headway.data.openmoji import OpenMoji
from headway.data.source import Joined, Selection, Source
from headway.data.split import split_records
from headway.data.tokens import Tokenizer
from headway.errors import UserError
from headway.recipe import DataRecipe


def open_sources(
    data: DataRecipe, *, cache: Path, tokenizer: Tokenizer | None, seed: int
) -> tuple[Source, Source | None]:
    """(training, validation or None) of ``data``. Indexes and tokens are kept in ``cache``.

    Validation is ``data.validation_path``, or records held out of ``data.path`` by caption or fraction.
    Raises UserError when a path is missing, holds nothing of the kind, or nothing is left to train on.
    """
    if data.validation_path is not None and data.validation_fraction > 0:
        raise UserError("data.validation_path and data.validation_fraction exclude each other: leave one of them out")
    records = _captioned(data, data.path, "data.path")
    training, held = split_records(
        len(records),
        records.captions,
        include=data.include,
        hold_out=data.hold_out,
        validation_fraction=data.validation_fraction,
        seed=seed,
    )
    validation: list[Source] = [Selection(records, held)] if len(held) else []
    if data.validation_path is not None:
        validation.append(_captioned(data, data.validation_path, "data.validation_path"))
    joined = Joined(tuple(validation)) if len(validation) > 1 else validation[0] if validation else None
    return Selection(records, training), joined


def _captioned(data: DataRecipe, path: Path | None, key: str) -> Source:
    size = image_size(data.resolution)
    if path is None:
        return OpenMoji(size)
    return ImageFolder(_existing_folder(path, key), size)


def _existing_folder(path: Path, key: str) -> Path:
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{key} = {path} is a file, and this data.kind reads a folder")
    raise UserError(f"{key} = {path} does not exist{_near_paths(path)}")


def _near_paths(path: Path) -> str:
    """What stands beside a missing path and is spelled nearly the same; or the part of it that exists."""
    parent = path.parent
    if not parent.is_dir():
        existing = next(folder for folder in path.absolute().parents if folder.is_dir())
        return f" (the part that does is {existing})"
    near = difflib.get_close_matches(path.name, sorted(entry.name for entry in parent.iterdir()), n=3, cutoff=0.4)
    return f"; near ones: {', '.join(str(parent / name) for name in near)}" if near else ""
