"""Small real files of every kind that data sources read, and ways to damage them."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from headway.data import BadRecord, Sample, Source
from headway.recipe import DataRecipe


def picture(number: int, height: int = 20, width: int = 30) -> Image.Image:
    """A smooth RGB picture that differs from every other number's."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 7 + number * 31) % 256, (y * 11 + number * 17) % 256, np.full_like(x, (number * 53) % 256)]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def encoded(number: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, kind)
    return buffer.getvalue()


def write_image_folder(folder: Path, count: int) -> Path:
    """``count`` pictures with .txt captions, every third in a folder within the folder."""
    for number in range(count):
        parent = folder / "more" if number % 3 == 2 else folder
        parent.mkdir(parents=True, exist_ok=True)
        (parent / f"{number:03d}.png").write_bytes(encoded(number))
        (parent / f"{number:03d}.txt").write_text(f"picture {number}\n")
    return folder


def write_shard(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def write_lines(path: Path, lines: list[object]) -> Path:
    """JSONL; a line given as bytes is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


def recipe(kind: str, path: Path | None, **fields: object) -> DataRecipe:
    return DataRecipe(kind=kind, path=path, **{"resolution": (8, 12), **fields})  # type: ignore[arg-type]


def read_all(source: Source, epoch: int = 0) -> list[Sample | str]:
    """Every record: its sample, or the text of the BadRecord in its place."""
    records: list[Sample | str] = []
    for index in range(len(source)):
        try:
            records.append(source.read(index, epoch))
        except BadRecord as bad:
            records.append(str(bad))
    return records


def check_image_or_named(records: list[Sample | str], blank: Sample) -> None:
    """Whatever was done to the files, a record is a sample of the right shape or a corrupt one with a name."""
    assert blank.image is not None
    for record in records:
        if isinstance(record, str):
            assert ": " in record
            continue
        assert record.image is not None
        assert record.image.shape == blank.image.shape
        assert record.image.dtype == torch.uint8
        assert isinstance(record.caption, str)


def flip_bits(data: bytes, places: list[int]) -> bytes:
    """``data`` with one bit flipped at each place (in bits, modulo the length)."""
    damaged = bytearray(data)
    for place in places:
        damaged[place // 8 % len(damaged)] ^= 1 << place % 8
    return bytes(damaged)


def sent(source: Source) -> Source:
    """The source as a spawned worker gets it."""
    copy: Source = pickle.loads(pickle.dumps(source))
    return copy
