"""Webdataset tar shards, read at random through an index of their members.

The webdataset library streams, and so cannot resume at an exact sample; the format is read here as it defines it:
consecutive members whose names are equal up to the first dot of the file name are one sample.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyarrow import feather

from headway.data.cache import built_once
from headway.data.images import IMAGE_SUFFIXES, Size, blank_image, read_image
from headway.data.sample import BadRecord, Sample
from headway.data.source import fingerprint_of
from headway.errors import UserError

_SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("caption", pa.large_string()),
        ("problem", pa.large_string()),
    ]
)
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")


class WebDataset:
    """One record for each sample of the shards, in the order they stand there.

    A caption is the text of the member ``txt``, or ``caption_column`` of ``json``. Indexes are kept in ``cache``.
    """

    def __init__(self, shards: list[Path], size: Size, caption_column: str, cache: Path) -> None:
        self.size = size
        self.shards = shards
        tables = [_index(shard, caption_column, cache) for shard in shards]
        self.index = pa.concat_tables(tables).combine_chunks()
        self.shard_of = pa.array([n for n, table in enumerate(tables) for _ in range(len(table))], pa.int32())
        if len(self.index) == 0:
            raise UserError(f"data.path: {', '.join(map(str, shards[:3]))} hold no samples")
        self.captions = _column(self.index, "caption")
        if _column(self.index, "problem").null_count == 0:
            problem = f"{self.index.column('key')[0]}: {self.index.column('problem')[0]}"
            raise UserError(
                f"data.path: no sample can be read; the first problem is {shards[self.shard_of[0].as_py()]}:{problem}"
            )
        # Keys, sizes and captions, but not the shards' folder: the same data elsewhere is the same.
        columns = (_column(self.index, name) for name in ("key", "offset", "size", "caption"))
        self.fingerprint = fingerprint_of(["webdataset", *(str(column.to_pylist()) for column in columns)])

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int, epoch: int) -> Sample:
        """image and caption. Raises BadRecord."""
        entry = {name: self.index.column(name)[index].as_py() for name in _SCHEMA.names}
        shard = self.shards[self.shard_of[index].as_py()]
        record = f"{shard}:{entry['key']}"
        if entry["problem"] is not None:
            raise BadRecord(record, entry["problem"])
        try:
            with shard.open("rb") as file:
                file.seek(entry["offset"])
                data = file.read(entry["size"])
        except OSError as error:
            raise BadRecord(record, str(error)) from error
        return Sample(image=read_image(data, self.size, record), caption=entry["caption"])

    def blank(self) -> Sample:
        """A black image without a caption."""
        return Sample(image=blank_image(self.size), caption="")


@dataclass
class _Entry:
    """A sample while its members are read: where its picture lies, its caption, or what is wrong."""

    key: str
    offset: int = 0
    size: int = 0
    caption: str | None = None
    problem: str | None = None
    extensions: tuple[str, ...] = ()


def _index(shard: Path, caption_column: str, cache: Path) -> pa.Table:
    state = shard.stat()
    name = fingerprint_of([str(shard.resolve()), str(state.st_size), str(state.st_mtime_ns), caption_column])
    build = partial(_write_index, shard, caption_column)
    return feather.read_table(built_once(cache / f"webdataset-{name}.arrow", build, _is_whole), memory_map=False)


def _write_index(shard: Path, caption_column: str, path: Path) -> None:
    entries = list(_entries(shard, caption_column))
    columns = {name: [getattr(entry, name) for entry in entries] for name in _SCHEMA.names}
    feather.write_feather(pa.table(columns, schema=_SCHEMA), path, compression="uncompressed")


def _is_whole(path: Path) -> bool:
    try:
        return bool(feather.read_table(path, memory_map=False).schema == _SCHEMA)
    except (pa.ArrowInvalid, OSError):
        return False


def _entries(shard: Path, caption_column: str) -> Iterator[_Entry]:
    """The samples of a shard; where it is damaged, a last one that says so and stands for all that follow."""
    entry: _Entry | None = None
    position = 0
    try:
        with tarfile.open(shard, mode="r:") as tar:
            for member in tar:
                position = tar.offset
                tar.members = []  # type: ignore[attr-defined] # tarfile keeps every header it has read
                matched = _KEY_AND_EXTENSION.fullmatch(member.name)
                if not member.isfile() or matched is None:
                    continue
                key, extension = matched.group(1), matched.group(2).lower()
                if entry is None or entry.key != key:
                    if entry is not None:
                        yield _judged(entry)
                    entry = _Entry(key)
                _take_member(entry, tar, member, extension, caption_column)
            damage = _damage_at(shard, tar.offset)
    except (tarfile.TarError, OSError) as error:
        if _is_compressed(shard):
            raise UserError(
                f"data.path: {shard} is compressed, so that no sample can be found at random: unpack it"
            ) from error
        damage = str(error)
    if entry is not None:
        yield _judged(entry)
    if damage is not None:
        yield _Entry(f"byte {position}", problem=f"the shard is damaged here and nothing after it is read ({damage})")


def _take_member(
    entry: _Entry, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, caption_column: str
) -> None:
    if extension in entry.extensions:
        entry.problem = f"two members end in .{extension}"
    entry.extensions += (extension,)
    if f".{extension.rsplit('.', 1)[-1]}" in IMAGE_SUFFIXES and not entry.size:
        entry.offset, entry.size = member.offset_data, member.size
    elif extension in ("txt", "json"):
        file = tar.extractfile(member)
        content = file.read() if file is not None else b""
        try:
            text = content.decode() if extension == "txt" else json.loads(content).get(caption_column)
        except (ValueError, AttributeError, RecursionError) as error:
            entry.problem = f"damaged .{extension} ({type(error).__name__}: {error})"
            return
        if isinstance(text, str):
            entry.caption = text.strip()
        elif text is not None:
            entry.problem = f"{caption_column!r} in .json is no text"


def _judged(entry: _Entry) -> _Entry:
    if entry.problem is None and not entry.size:
        entry.problem = f"no picture among its members: {', '.join(entry.extensions)}"
    if entry.problem is None and entry.caption is None:
        entry.problem = "no caption: neither a .txt nor data.caption_column in a .json"
    return entry


def _damage_at(shard: Path, offset: int) -> str | None:
    """tarfile takes a damaged header for the end of the archive; the true end is a block of zeros, or of the file."""
    with shard.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    return "invalid header" if any(block) else None


def _is_compressed(shard: Path) -> bool:
    with shard.open("rb") as file:
        return file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zX"))


def _column(table: pa.Table, name: str) -> pa.LargeStringArray:
    return table.column(name).combine_chunks()
