"""Documents tokenised once into memory-mapped files that every rank and worker reads.

A store is a folder: ``tokens.bin`` (uint32, all documents end to end), ``offsets.npy`` (int64, (N + 1,)) and
``problems.json`` ({document: name and reason} of the corrupt ones, which have no tokens).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np

from headway.data.cache import built_once
from headway.data.source import fingerprint_of
from headway.data.tokens import Tokenizer
from headway.errors import UserError

_DOCUMENTS_AT_ONCE = 512


@dataclass(frozen=True)
class Document:
    """A text by name, or the reason why there is none."""

    name: str
    text: str | None
    problem: str | None = None


class TokenStore:
    """The documents of a store's folder. Files are mapped on first use, in each process anew."""

    def __init__(self, folder: Path, fingerprint: str, padding: int) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.padding = padding
        problems = json.loads((folder / "problems.json").read_text())
        self.problems: dict[int, tuple[str, str]] = {int(document): tuple(why) for document, why in problems.items()}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 (N + 1,): where each document's tokens begin, and where the last one's end."""
        return np.asarray(np.load(self.folder / "offsets.npy", mmap_mode="r"))

    @cached_property
    def _tokens(self) -> np.ndarray:
        # A plain view, as each slice of a memmap would be a memmap, which takes ten times as long to make.
        return np.asarray(np.memmap(self.folder / "tokens.bin", dtype="<u4", mode="r"))

    def tokens(self, document: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """int64: tokens [begin, end) of a document; the last token of a document is the tokenizer's end of document."""
        start, stop = int(self.offsets[document]), int(self.offsets[document + 1])
        upper = stop if end is None else min(stop, start + end)
        return self._tokens[start + begin : upper].astype(np.int64)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("offsets", "_tokens")}


def open_token_store(
    files: list[Path], documents: Callable[[], Iterator[Document]], column: str, tokenizer: Tokenizer, cache: Path
) -> TokenStore:
    """The store of ``files`` in ``cache``, made on first use: ``documents()`` goes through them.

    Kept by the files' paths, sizes and modification times, the column and the tokenizer's fingerprint.
    Raises UserError when there is not one whole document.
    """
    states = [(file.resolve(), file.stat()) for file in files]
    parts = [f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    key = fingerprint_of(["tokens", column, tokenizer.fingerprint, *parts])
    build = partial(_write_store, documents, tokenizer)
    folder = built_once(cache / f"tokens-{key}", build, _is_whole)
    # Names and sizes, but neither folder nor time: the same data elsewhere is the same.
    content = fingerprint_of([column, tokenizer.fingerprint, *(f"{p.name} {state.st_size}" for p, state in states)])
    store = TokenStore(folder, content, tokenizer.padding)
    if len(store) == len(store.problems):
        why = next(iter(store.problems.values()), (str(files[0]), "empty"))
        raise UserError(f"data.path: no document can be read; the first problem is {why[0]}: {why[1]}")
    return store


def _write_store(documents: Callable[[], Iterator[Document]], tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir()
    lengths: list[int] = []
    problems: dict[int, tuple[str, str]] = {}
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _batches(documents()):
            encoded = iter(tokenizer.encode([document.text for document in batch if document.text is not None]))
            for document in batch:
                ids = next(encoded) if document.text is not None else []
                if ids:
                    np.array([*ids, tokenizer.end_of_document], dtype="<u4").tofile(file)
                else:
                    problems[len(lengths)] = (document.name, document.problem or "holds no text")
                lengths.append(len(ids) + 1 if ids else 0)
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    (folder / "problems.json").write_text(json.dumps(problems))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    rest = iter(documents)
    while batch := list(islice(rest, _DOCUMENTS_AT_ONCE)):
        yield batch


def _is_whole(folder: Path) -> bool:
    try:
        json.loads((folder / "problems.json").read_text())
        tokens = int(np.load(folder / "offsets.npy", mmap_mode="r")[-1])
        return (folder / "tokens.bin").stat().st_size == 4 * tokens
    except (OSError, ValueError, EOFError):
        return False
