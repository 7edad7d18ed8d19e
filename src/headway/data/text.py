"""Language samples from a store of tokenised documents: packed end to end, or one document a sample."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from headway.data.randomness import permutation
from headway.data.sample import BadRecord, Sample
from headway.data.source import fingerprint_of
from headway.data.token_store import Document, TokenStore
from headway.errors import UserError

_EPOCHS_KEPT = 2


class PackedText:
    """Sample i is tokens [i·L, i·L + L + 1) of the epoch's stream: all documents end to end, in the epoch's own order.

    ``documents``: int64, which of the store's documents take part. L is ``sequence_length``; the L + 1 tokens give L
    inputs and, one later, their labels. The last tokens of an epoch that fill no sample are left out.
    A corrupt document has no tokens; the sample in which it would stand names it in ``skipped``.
    Raises UserError when the documents fill no sample.
    """

    captions = None

    def __init__(
        self, store: TokenStore, documents: np.ndarray, sequence_length: int, seed: int, shuffle: bool
    ) -> None:
        self.store = store
        self.documents = documents
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.lengths = np.diff(store.offsets)[documents]
        total = int(self.lengths.sum())
        self.size = (total - 1) // sequence_length
        if self.size < 1:
            raise UserError(
                f"data.sequence_length = {sequence_length}: the text holds {total} tokens, fewer than one "
                f"sequence and its last label; set it to {max(1, total - 1)} or less, or give more text"
            )
        self.fingerprint = fingerprint_of(
            ["packed", store.fingerprint, documents.astype("<i8").tobytes(), f"{sequence_length} {seed} {shuffle}"]
        )
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return self.size

    def read(self, index: int, epoch: int) -> Sample:
        """tokens (L + 1,), document_starts, skipped."""
        order, starts = self._epoch(epoch)
        begin = index * self.sequence_length
        end = begin + self.sequence_length + 1
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        last = int(np.searchsorted(starts, end, side="left"))
        pieces = [
            self.store.tokens(int(order[place]), max(0, begin - int(starts[place])), end - int(starts[place]))
            for place in range(first, min(last, len(order)))
        ]
        # A corrupt document begins where the next one does, and is no document.
        inside = np.unique(np.maximum(starts[first:last], begin)) - begin
        return Sample(
            tokens=torch.from_numpy(np.concatenate(pieces)),
            document_starts=torch.from_numpy(inside),
            skipped=self._skipped(order, starts, index),
        )

    def blank(self) -> Sample:
        """L + 1 tokens of padding, as one document."""
        tokens = torch.full((self.sequence_length + 1,), self.store.padding, dtype=torch.int64)
        return Sample(tokens=tokens, document_starts=torch.zeros(1, dtype=torch.int64))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents in the epoch's order, (N + 1,) where each begins in its stream). Two epochs are kept."""
        if epoch not in self._epochs:
            order = np.arange(len(self.documents))
            if self.shuffle:
                order = permutation(len(order), seed=self.seed, stream="documents", step=epoch)
            starts = np.concatenate([[0], np.cumsum(self.lengths[order])])
            self._epochs[epoch] = (self.documents[order], starts)
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _skipped(self, order: np.ndarray, starts: np.ndarray, index: int) -> tuple[str, ...]:
        if not self.store.problems:
            return ()
        begin = int(np.searchsorted(starts[:-1], index * self.sequence_length))
        is_last = index == self.size - 1
        end = len(order) if is_last else int(np.searchsorted(starts[:-1], (index + 1) * self.sequence_length))
        found = (self.store.problems.get(int(document)) for document in order[begin:end])
        return tuple(f"{name}: {reason}" for name, reason in filter(None, found))


class SeparateText:
    """One document a sample, cut to sequence_length + 1 tokens; ``documents`` as in PackedText."""

    captions = None

    def __init__(self, store: TokenStore, documents: np.ndarray, sequence_length: int) -> None:
        self.store = store
        self.documents = documents
        self.sequence_length = sequence_length
        self.fingerprint = fingerprint_of(
            ["separate", store.fingerprint, documents.astype("<i8").tobytes(), str(sequence_length)]
        )

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, index: int, epoch: int) -> Sample:
        """tokens (up to L + 1,) and document_starts [0]. Raises BadRecord for a corrupt document."""
        document = int(self.documents[index])
        if document in self.store.problems:
            raise BadRecord(*self.store.problems[document])
        tokens = self.store.tokens(document, 0, self.sequence_length + 1)
        return Sample(tokens=torch.from_numpy(tokens), document_starts=torch.zeros(1, dtype=torch.int64))

    def blank(self) -> Sample:
        """Two tokens of padding."""
        tokens = torch.full((2,), self.store.padding, dtype=torch.int64)
        return Sample(tokens=tokens, document_starts=torch.zeros(1, dtype=torch.int64))


def jsonl_documents(files: list[Path], text_column: str) -> Iterator[Document]:
    """The texts of all lines in order, for tokenising; a line that holds none is a problem. Empty lines are passed."""
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document(f"{path}:{number}", line, text_column)


def _document(name: str, line: bytes, text_column: str) -> Document:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Document(name, None, f"not a line of JSON ({error})")
    if not isinstance(fields, dict) or not isinstance(fields.get(text_column), str):
        return Document(name, None, f"no text under {text_column!r}")
    return Document(name, fields[text_column])
