"""Files in a folder with their captions: ``NAME.txt`` beside ``NAME.jpg``, or one ``metadata.jsonl`` for all."""

import json
from abc import ABC, abstractmethod
from pathlib import Path

import pyarrow as pa

from headway.data.images import IMAGE_SUFFIXES, Size, blank_image, read_image
from headway.data.sample import BadRecord, Sample
from headway.data.source import fingerprint_of
from headway.errors import UserError

METADATA = "metadata.jsonl"


class CaptionedFolder(ABC):
    """One record for each file with one of ``suffixes`` in a folder and the folders in it.

    Raises UserError when there is no such file, or none has a caption.
    """

    def __init__(self, folder: Path, suffixes: frozenset[str]) -> None:
        entries: dict[str, tuple[str | None, str | None]] = {}
        for path in folder.rglob("*"):
            if path.suffix.lower() in suffixes and not path.name.startswith(".") and path.is_file():
                entries[path.relative_to(folder).as_posix()] = _caption_beside(path)
        if not entries:
            raise UserError(f"data.path = {folder} holds no file ending in {', '.join(sorted(suffixes))}")
        for metadata in sorted(folder.rglob(METADATA)):
            entries |= _read_metadata(metadata, folder, set(entries))
        if all(caption is None for caption, _ in entries.values()):
            raise UserError(
                f"data.path = {folder}: no file has a caption; write NAME.txt beside each file, or {METADATA}"
            )
        names = sorted(entries)
        captions = [entries[name][0] for name in names]
        parts = [part for name in names for part in (name, str(_size(folder / name)), entries[name][0] or "")]
        self.folder = folder
        self.paths = pa.array(names, pa.large_string())
        self.captions = pa.array(captions, pa.large_string())
        self.problems = pa.array([entries[name][1] for name in names], pa.large_string())
        """Why a record is known to be corrupt, or null."""
        self.fingerprint = fingerprint_of(["files", *parts])
        """Of the relative paths, sizes in bytes and captions (not the contents, which would have to be read)."""

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, epoch: int) -> Sample:
        """What the file holds, and its caption. Raises BadRecord when either is missing or damaged."""
        path = self.folder / self.paths[index].as_py()
        problem, caption = self.problems[index].as_py(), self.captions[index].as_py()
        if problem is not None:
            raise BadRecord(str(path), problem)
        if caption is None:
            raise BadRecord(str(path), f"no caption: neither {path.stem}.txt beside it nor a line of {METADATA}")
        sample = self.read_file(path)
        sample.caption = caption
        return sample

    @abstractmethod
    def read_file(self, path: Path) -> Sample:
        """The sample in a file, without its caption. Raises BadRecord."""


class ImageFolder(CaptionedFolder):
    """One record for each picture of a folder and of the folders in it."""

    def __init__(self, folder: Path, size: Size) -> None:
        super().__init__(folder, IMAGE_SUFFIXES)
        self.size = size

    def read_file(self, path: Path) -> Sample:
        """image. Raises BadRecord."""
        try:
            with path.open("rb") as file:
                return Sample(image=read_image(file, self.size, str(path)))
        except OSError as error:
            raise BadRecord(str(path), str(error)) from error

    def blank(self) -> Sample:
        """A black image without a caption."""
        return Sample(image=blank_image(self.size), caption="")


def _caption_beside(path: Path) -> tuple[str | None, str | None]:
    """(caption, problem) from the .txt beside ``path``."""
    beside = path.with_suffix(".txt")
    try:
        return beside.read_text(encoding="utf-8").strip(), None
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{beside.name} cannot be read ({error})"


def _read_metadata(metadata: Path, folder: Path, present: set[str]) -> dict[str, tuple[str | None, str | None]]:
    """{relative path: (caption, problem)} of a metadata.jsonl; a damaged line is a record named after its number."""
    entries: dict[str, tuple[str | None, str | None]] = {}
    above = metadata.parent.relative_to(folder)
    for number, line in enumerate(metadata.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            name = (above / fields["file_name"]).as_posix()
            caption = fields["text"] if "text" in fields else fields["caption"]
            if not isinstance(caption, str):
                raise TypeError(f"the caption is of type {type(caption).__name__}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            name = (above / f"{METADATA}:{number}").as_posix()
            entries[name] = (None, f"damaged line ({type(error).__name__}: {error})")
            continue
        entries[name] = (caption.strip(), None if name in present else f"named in {METADATA} but not there")
    return entries


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
