"""A handful of records in each format that recipes read: unequal in length, and where records can be, one corrupt."""

import io
import json
import tarfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from headway.recipe import DataRecipe

RECORDS = 8
"""Pictures, clips and conversations: a global batch, so that every step has the corrupt one."""
CORRUPT = 5
SIDE = 16
"""Pixels of a picture's side."""
FRAMES = 3
CAPTION_TOKENS = 8
PACKED_LENGTH = 32
SEPARATE_LENGTH = 160
"""Long enough that documents are padded to different lengths."""
WORDS = tuple(
    "a small red circle on the left of two large green squares with blue and yellow stripes under it".split()  # noqa: SIM905
)


def small_data(data: DataRecipe, folder: Path, *, text: bool) -> dict[str, Any]:
    """The data section of the small recipe, with its files written into ``folder``. ``text``: parquet holds text."""
    folder.mkdir()
    kind = "image_folder" if data.kind == "openmoji" else data.kind
    writer = WRITERS["parquet_text" if kind == "parquet" and text else kind]
    wide = not isinstance(data.resolution, int) and data.resolution[0] != data.resolution[1]
    return {
        "kind": kind,
        "path": str(writer(folder)),
        "resolution": [SIDE // 2, SIDE] if wide else SIDE,
        "frames": FRAMES if kind == "video_folder" else 1,
        "sequence_length": PACKED_LENGTH if data.packing and text else SEPARATE_LENGTH,
        "packing": data.packing,
        "shuffle": data.shuffle,
        "max_bad_records": 10**6,
    }


def caption(number: int) -> str:
    """One to six words."""
    return " ".join(WORDS[(number * 3 + place) % len(WORDS)] for place in range(1 + number * 5 % 6))


def picture(number: int, height: int = SIDE + 8, width: int = SIDE + 12) -> Image.Image:
    """Smooth, and unlike any other number's."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 7 + number * 31) % 256, (y * 11 + number * 17) % 256, (x * y + number * 53) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def encoded(number: int) -> bytes:
    """A PNG; the corrupt record's is cut."""
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()[: 60 if number == CORRUPT else None]


def document(number: int) -> str:
    """One to 40 words, most of them short."""
    length = (1, 2, 40, 3, 12, 1, 25, 6)[number % 8]
    return " ".join(WORDS[(number * 5 + place * (1 + number % 3)) % len(WORDS)] for place in range(length))


def _image_folder(folder: Path) -> Path:
    for number in range(RECORDS):
        (folder / f"{number}.png").write_bytes(encoded(number))
        (folder / f"{number}.txt").write_text(caption(number))
    return folder


def _webdataset(folder: Path) -> Path:
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard * RECORDS // 2, (shard + 1) * RECORDS // 2):
                for name, content in ((f"{number}.png", encoded(number)), (f"{number}.txt", caption(number).encode())):
                    header = tarfile.TarInfo(name)
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))
    return folder / "{0..1}.tar"


def _parquet(folder: Path) -> Path:
    rows = {
        "image": [{"bytes": encoded(number), "path": None} for number in range(RECORDS)],
        "caption": [caption(number) for number in range(RECORDS)],
    }
    parquet.write_table(pa.table(rows), folder / "0.parquet", row_group_size=3)
    return folder / "*.parquet"


def _parquet_text(folder: Path) -> Path:
    texts = [document(number) for number in range(10 * RECORDS)]
    parquet.write_table(pa.table({"text": texts}), folder / "0.parquet", row_group_size=20)
    return folder / "*.parquet"


def _jsonl_text(folder: Path) -> Path:
    return _lines(folder / "0.jsonl", [{"text": document(number)} for number in range(10 * RECORDS)])


def _video_folder(folder: Path) -> Path:
    for number in range(RECORDS):
        clip = folder / f"{number}.mp4"
        _write_clip(clip, [picture(number * 16 + frame, 32, 32) for frame in range(FRAMES + 1)])
        if number == CORRUPT:
            clip.write_bytes(clip.read_bytes()[:60])
        (folder / f"{number}.txt").write_text(caption(number))
    return folder


def _write_clip(path: Path, frames: list[Image.Image]) -> None:
    av: Any = import_module("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


def _jsonl_conversations(folder: Path) -> Path:
    """Pictures of two sizes, two in one conversation, and a conversation without any."""
    for number in range(3):
        picture(number, SIDE, SIDE + 8 * (number % 2)).save(folder / f"{number}.png")
    first, second, third = ({"type": "image", "image": f"{number}.png"} for number in range(3))
    question = {"type": "text", "text": "what?"}
    asked = ([first, question], [second, question, third], [question])
    lines: list[Any] = [
        {
            "messages": [
                {"role": "user", "content": asked[number % 3]},
                {"role": "assistant", "content": document(number)},
            ]
        }
        for number in range(RECORDS)
    ]
    lines[CORRUPT] = {"messages": []}
    return _lines(folder / "0.jsonl", lines)


def _lines(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


WRITERS: dict[str, Callable[[Path], Path]] = {
    "image_folder": _image_folder,
    "webdataset": _webdataset,
    "parquet": _parquet,
    "parquet_text": _parquet_text,
    "jsonl_text": _jsonl_text,
    "video_folder": _video_folder,
    "jsonl_conversations": _jsonl_conversations,
}
"""Each writes its files into a folder and returns what ``data.path`` is then."""
