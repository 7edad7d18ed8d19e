"""From the recipe's data section to the training and validation sources."""

from functools import partial
from pathlib import Path

import numpy as np

from headway.data.conversations import JsonlConversations
from headway.data.folders import ImageFolder
from headway.data.images import image_size
from headway.data.openmoji import OpenMoji
from headway.data.parquet import ParquetImages, parquet_documents
from headway.data.paths import existing_files, existing_folder
from headway.data.source import Joined, Selection, Source
from headway.data.split import split_records
from headway.data.text import PackedText, SeparateText, jsonl_documents
from headway.data.token_store import TokenStore, open_token_store
from headway.data.tokens import Tokenizer
from headway.data.video import VideoFolder
from headway.data.webdataset import WebDataset
from headway.errors import UserError
from headway.recipe import DataRecipe


def open_sources(
    data: DataRecipe, *, cache: Path, tokenizer: Tokenizer | None, seed: int
) -> tuple[Source, Source | None]:
    """(training, validation or None) of ``data``. Indexes and tokens are kept in ``cache``.

    Validation is ``data.validation_path``, or records held out of ``data.path`` by caption or fraction, or both.
    With a ``tokenizer`` a parquet file is text, without it is pictures; jsonl_text needs one.
    Raises UserError when a path is missing, holds nothing of the kind, or nothing is left to train on.
    """
    if data.validation_path is not None and data.validation_fraction > 0:
        raise UserError("data.validation_path and data.validation_fraction exclude each other: leave one of them out")
    records = _open_records(data, data.path, "data.path", cache, tokenizer)
    training, held = split_records(
        len(records),
        None if isinstance(records, TokenStore) else records.captions,
        include=data.include,
        hold_out=data.hold_out,
        validation_fraction=data.validation_fraction,
        seed=seed,
    )
    validation = []
    if len(held):
        remedy = "this is what is held out for validation: raise data.validation_fraction"
        validation.append(_part(data, records, held, seed, remedy))
    if data.validation_path is not None:
        apart = _open_records(data, data.validation_path, "data.validation_path", cache, tokenizer)
        remedy = "this is the text of data.validation_path"
        validation.append(_part(data, apart, np.arange(len(apart)), seed, remedy))
    joined = Joined(tuple(validation)) if len(validation) > 1 else validation[0] if validation else None
    return _part(data, records, training, seed, "this is what is left of data.path for training"), joined


def _open_records(
    data: DataRecipe, path: Path | None, key: str, cache: Path, tokenizer: Tokenizer | None
) -> Source | TokenStore:
    """What can be split: a source of records, or documents that are packed into samples after the split."""
    size = image_size(data.resolution)
    if path is None:
        return OpenMoji(size)
    if data.kind == "jsonl_text" or (data.kind == "parquet" and tokenizer is not None):
        return _open_documents(data, path, key, cache, tokenizer)
    match data.kind:
        case "image_folder":
            return ImageFolder(existing_folder(path, key), size)
        case "video_folder":
            return VideoFolder(existing_folder(path, key), size, data.frames, data.frame_stride)
        case "webdataset":
            return WebDataset(existing_files(path, key, ".tar"), size, data.caption_column, cache)
        case "parquet":
            return ParquetImages(existing_files(path, key, ".parquet"), size, data.image_column, data.caption_column)
        case "jsonl_conversations":
            return JsonlConversations(existing_files(path, key, ".jsonl"))
    raise UserError(f"{key}: data.kind = {data.kind!r} reads no path; leave it out")


def _open_documents(data: DataRecipe, path: Path, key: str, cache: Path, tokenizer: Tokenizer | None) -> TokenStore:
    if tokenizer is None:
        raise UserError(f'data.kind = {data.kind!r} holds text, which needs model.tokenizer: a folder, or "bytes"')
    is_parquet = data.kind == "parquet"
    files = existing_files(path, key, ".parquet" if is_parquet else ".jsonl")
    documents = partial(parquet_documents if is_parquet else jsonl_documents, files, data.text_column)
    return open_token_store(files, documents, data.text_column, tokenizer, cache)


def _part(data: DataRecipe, records: Source | TokenStore, indices: np.ndarray, seed: int, remedy: str) -> Source:
    """The records at ``indices`` as samples; ``remedy`` ends the error where they are too few to make one."""
    if not isinstance(records, TokenStore):
        return Selection(records, indices)
    if not data.packing:
        return SeparateText(records, indices, data.sequence_length)
    try:
        return PackedText(records, indices, data.sequence_length, seed, data.shuffle)
    except UserError as error:
        raise UserError(f"{error} ({remedy})") from None
