"""Files made once from the data and read by every rank: never seen half written, never made twice at once."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from headway.errors import UserError


def built_once(path: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """``path`` (a file or folder), made by ``build(beside)`` and renamed unless it is there and ``is_whole``.

    Processes that ask at the same time wait for the first; when that one dies, the next takes over.
    Raises UserError when the place cannot be written.
    """
    if path.exists() and is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists() and is_whole(path):
                return path
            beside = path.with_name(f"{path.name}.partial")
            _remove(beside)
            build(beside)
            _remove(path)
            os.rename(beside, path)
    except OSError as error:
        raise UserError(f"data.cache: cannot write {path} ({error}); set data.cache to a folder with room") from error
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
