"""Tokenizers made from the training captions, kept in the run directory: token ids must outlive changes of the data."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headway.data import Source, captions_of, word_tokenizer
from headway.models import load_tokenizer
from headway.recipe import ModelRecipe
from headway.runs import writing
from headway.train.checkpoint_manifest import checkpoints_in

_FOLDER = "tokenizers"


def make_tokenizers(
    recipe: ModelRecipe, source: Source, directory: Path, write: bool
) -> Mapping[str, PreTrainedTokenizerBase]:
    """By text encoder, those made from captions: the checkpoints' own, or new ones (kept if ``write``).

    Raises RunFailed when they can't be kept.
    """
    kept = read_tokenizers(recipe, directory) if checkpoints_in(directory / "checkpoints") else None
    if kept is not None:
        return kept
    made = {name: word_tokenizer(captions_of(source), recipe.text_encoders[name].max_length) for name in _names(recipe)}
    if write and made:
        beside = directory / f".{_FOLDER}.new"
        with writing(directory / _FOLDER):
            shutil.rmtree(beside, ignore_errors=True)
            for name, tokenizer in made.items():
                tokenizer.save_pretrained(beside / name)
            shutil.rmtree(directory / _FOLDER, ignore_errors=True)
            os.rename(beside, directory / _FOLDER)
    return made


def read_tokenizers(recipe: ModelRecipe, directory: Path) -> Mapping[str, PreTrainedTokenizerBase] | None:
    """The tokenizers that the run in ``directory`` was trained with; None when it has kept none."""
    folder = directory / _FOLDER
    return {name: load_tokenizer(folder / name) for name in _names(recipe)} if folder.is_dir() else None


def _names(recipe: ModelRecipe) -> list[str]:
    return [name for name, encoder in recipe.text_encoders.items() if encoder.tokenizer == "words"]
