"""Parquet files: pictures with captions, and text.

A row is read with its whole row group, of which a few are kept: for shuffled pictures write small groups (100 rows).
"""

import difflib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from headway.data.images import Size, blank_image, read_image
from headway.data.sample import BadRecord, Sample
from headway.data.source import fingerprint_of
from headway.data.token_store import Document
from headway.errors import UserError


class ParquetImages:
    """One record a row: ``image_column`` holds encoded pictures, as bytes or as {"bytes", "path"}."""

    def __init__(self, files: list[Path], size: Size, image_column: str, caption_column: str) -> None:
        self.size = size
        self.files = files
        self.image_column = image_column
        captions: list[pa.LargeStringArray] = []
        groups: list[tuple[int, int]] = []
        sizes: list[str] = []
        for number, path in enumerate(files):
            with _open(path) as file:
                _require_image_column(file.schema_arrow, image_column, path)
                _require_text_column(file.schema_arrow, caption_column, path, "caption_column")
                captions += [_captions(file, group, caption_column) for group in range(file.num_row_groups)]
                groups += [(number, group) for group in range(file.num_row_groups)]
                sizes += [str(file.metadata.row_group(group).total_byte_size) for group in range(file.num_row_groups)]
        self.groups = groups
        """(number of the file, number of its row group) of each row group, and where each begins among all rows."""
        self.group_starts = np.cumsum([0, *(len(part) for part in captions)])
        self.captions = pa.concat_arrays(captions) if captions else pa.array([], pa.large_string())
        if self.captions.null_count == len(self.captions):
            raise UserError(f"data.path: {', '.join(map(str, files[:3]))} hold no row with a caption")
        self.fingerprint = fingerprint_of(["parquet", *sizes, str(self.captions.to_pylist())])

    def __len__(self) -> int:
        return len(self.captions)

    def read(self, index: int, epoch: int) -> Sample:
        """image and caption. Raises BadRecord."""
        place = int(np.searchsorted(self.group_starts, index, side="right")) - 1
        number, group = self.groups[place]
        file = self.files[number]
        row = index - int(self.group_starts[place])
        record = f"{file}:row group {group}, row {row}"
        caption = self.captions[index].as_py()
        if caption is None:
            raise BadRecord(record, "no caption, or it cannot be read")
        try:
            value = _row_group(file, group, self.image_column, file.stat().st_mtime_ns)[row].as_py()
        except (
            OSError,
            IndexError,
            pa.ArrowException,
        ) as error:  # a damaged row group may hold fewer rows than it says
            raise BadRecord(record, f"the row group cannot be read ({error})") from error
        data = value.get("bytes") if isinstance(value, dict) else value
        if not data:
            raise BadRecord(record, "holds no picture's bytes")
        return Sample(image=read_image(data, self.size, record), caption=caption)

    def blank(self) -> Sample:
        """A black image without a caption."""
        return Sample(image=blank_image(self.size), caption="")


def parquet_documents(files: list[Path], text_column: str) -> Iterator[Document]:
    """The texts of all rows in order, for tokenising. A null, or a row group that cannot be read, is a problem."""
    for file in files:
        parquet_file = _open(file)
        _require_text_column(parquet_file.schema_arrow, text_column, file, "text_column")
        for group in range(parquet_file.num_row_groups):
            record = f"{file}:row group {group}"
            try:
                column = parquet_file.read_row_group(group, [text_column], use_threads=False).column(0)
                column.validate(full=True)
            except (OSError, pa.ArrowException) as error:
                yield Document(record, None, f"cannot be read ({error})")
                continue
            for row, text in enumerate(column.to_pylist()):
                yield Document(f"{record}, row {row}", text, "null" if text is None else None)


def _captions(file: parquet.ParquetFile, group: int, column: str) -> pa.LargeStringArray:
    """The captions of a row group; nulls when they are damaged, so that each of its rows is a corrupt record."""
    try:
        part = file.read_row_group(group, [column], use_threads=False).column(0).combine_chunks()
        part.validate(full=True)
        return part.cast(pa.large_string())
    except (OSError, pa.ArrowException):
        return pa.nulls(file.metadata.row_group(group).num_rows, pa.large_string())


@lru_cache(maxsize=4)
def _row_group(file: Path, group: int, column: str, mtime_ns: int) -> pa.ChunkedArray:
    """One column of a row group. ``mtime_ns`` is there so that a file written anew is read anew."""
    return _footer(file, mtime_ns).read_row_group(group, [column], use_threads=False).column(0)


@lru_cache(maxsize=64)
def _footer(file: Path, mtime_ns: int) -> parquet.ParquetFile:
    return parquet.ParquetFile(file)


def _open(file: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"data.path: {file} is not a readable parquet file ({error})") from error


def _require_image_column(schema: pa.Schema, name: str, file: Path) -> None:
    kind = _column_type(schema, name, file, "image_column")
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise UserError(f'data.image_column: {name!r} of {file} is {kind}, not bytes or a struct with "bytes"')


def _require_text_column(schema: pa.Schema, name: str, file: Path, key: str) -> None:
    kind = _column_type(schema, name, file, key)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"data.{key}: {name!r} of {file} is {kind}, not text")


def _column_type(schema: pa.Schema, name: str, file: Path, key: str) -> pa.DataType:
    if name not in schema.names:
        near = difflib.get_close_matches(name, schema.names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(schema.names)}"
        raise UserError(f"data.{key}: {file} has no column {name!r}{hint}")
    return schema.field(name).type
