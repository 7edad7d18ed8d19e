"""What makes a checkpoint folder whole: its name, and a manifest with the size and SHA-256 of every file in it.

A checkpoint is ``step-XXXXXXXX/`` with ``values.json`` (plain values), torch.distributed.checkpoint's files (tensors)
and ``manifest.json``. It is written as ``.step-XXXXXXXX.partial`` and renamed when all of it is on disk.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.errors import UserError

MANIFEST = "manifest.json"
VALUES = "values.json"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint taken after ``step`` steps lies."""
    return directory / f"step-{step:08d}"


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """The checkpoints of a directory by step, oldest first, damaged ones included; empty when there is no directory."""
    if not directory.is_dir():
        return {}
    found = {int(path.name[5:]): path for path in directory.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)}
    return dict(sorted(found.items()))


def hashed(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of the named files of a folder."""
    entries = {}
    for name in names:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": digest}
    return entries


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with a checksum of its own, and force it and the folder's entries to disk."""
    write_durably(folder / MANIFEST, json.dumps({"manifest": manifest, "sha256": _digest(manifest)}, indent=1))
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UserError, naming the file and what is wrong, when it can't be trusted."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text())
        manifest: dict[str, Any] = document["manifest"]
        if document["sha256"] != _digest(manifest):
            raise ValueError("its own checksum does not match")
        if any(Path(name).name != name for name in manifest["files"]):
            raise ValueError("it names a file outside the checkpoint")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return manifest


def problems(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with a checkpoint, file by file. Of ``shares`` readers each checks every shares-th file."""
    try:
        files = read_manifest(folder)["files"]
    except UserError as error:
        return [str(error)]
    found = []
    # By size, so that the readers' shares are about equal.
    for name in sorted(files, key=lambda name: (-files[name]["size"], name))[share::shares]:
        problem = _problem(folder / name, files[name])
        if problem:
            found.append(f"{folder / name} {problem}")
    return found


def newest_good(directory: Path, on_damaged: Callable[[Path, list[str]], None]) -> Path | None:
    """The newest whole checkpoint of a directory, or None, found by one process that reads all of it.

    ``on_damaged(path, problems)`` is told of each damaged one that is passed over.
    """
    for path in reversed(checkpoints_in(directory).values()):
        wrong = problems(path)
        if not wrong:
            return path
        on_damaged(path, wrong)
    return None


def write_durably(path: Path, text: str) -> None:
    """Write a text file and force it to disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: new names and renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a whole folder to its final name. A folder that was there is set aside until the new one stands."""
    aside = target.parent / f".{target.name}.replaced"
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that at no moment half of it bears a checkpoint's name."""
    doomed = checkpoint.parent / f".{checkpoint.name}.deleting"
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def clear_leftovers(directory: Path) -> list[Path]:
    """Finish what a killed run left undone in its checkpoint directory; gives the paths that were removed."""
    for aside in directory.glob(".step-*.replaced"):
        target = directory / aside.name.removeprefix(".").removesuffix(".replaced")
        if not target.exists():
            aside.rename(target)
    leftovers = [path for end in ("partial", "deleting", "replaced") for path in directory.glob(f".step-*.{end}")]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def _problem(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        found = hashed(path.parent, [path.name])[path.name]
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    if found["size"] != expected["size"]:
        return f"has {found['size']} bytes instead of {expected['size']}"
    if found["sha256"] != expected["sha256"]:
        return "has another SHA-256 than when it was written"
    return None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
