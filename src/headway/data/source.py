"""What every source of data looks like to the loader, and a part of one chosen by record."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from headway.data.sample import Sample
from headway.errors import UserError


class Source(Protocol):
    """A map from record index to sample. It can be pickled, and read in many processes at once."""

    @property
    def fingerprint(self) -> str:
        """Changes when the records or their order change; stored in checkpoints."""
        ...

    @property
    def captions(self) -> pa.LargeStringArray | None:
        """(len,), to choose records by; null where a record has none. None where this kind of record never has one."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, epoch: int) -> Sample:
        """The sample of a record. ``epoch`` matters only where records are mixed anew each epoch (packed text).

        Raises BadRecord when the record is corrupt.
        """
        ...

    def blank(self) -> Sample:
        """A sample of the right shape that says nothing: it stands, with weight 0, in a corrupt record's place."""
        ...


@dataclass(frozen=True)
class Selection:
    """The records of ``source`` at ``indices`` (int64, (N,)), in that order."""

    source: Source
    indices: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Changes with the source, the choice and its order."""
        return fingerprint_of([self.source.fingerprint, self.indices.astype("<i8").tobytes()])

    @property
    def captions(self) -> pa.LargeStringArray | None:
        """The chosen records'."""
        captions = self.source.captions
        return None if captions is None else captions.take(pa.array(self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, epoch: int) -> Sample:
        """The ``index``-th chosen record. Raises BadRecord."""
        return self.source.read(int(self.indices[index]), epoch)

    def blank(self) -> Sample:
        """The source's."""
        return self.source.blank()


@dataclass(frozen=True)
class Joined:
    """The records of several sources of one kind, one source after the other."""

    sources: tuple[Source, ...]

    @property
    def fingerprint(self) -> str:
        """Changes with any source, and their order."""
        return fingerprint_of([source.fingerprint for source in self.sources])

    @property
    def captions(self) -> pa.LargeStringArray | None:
        """All sources', one after the other; None when one has none."""
        captions = [source.captions for source in self.sources]
        return None if any(part is None for part in captions) else pa.concat_arrays(captions)

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def read(self, index: int, epoch: int) -> Sample:
        """Record ``index``, counted over all sources. Raises BadRecord."""
        for source in self.sources:
            if index < len(source):
                return source.read(index, epoch)
            index -= len(source)
        raise IndexError(index)

    def blank(self) -> Sample:
        """The first source's: all are of one kind."""
        return self.sources[0].blank()


def captions_of(source: Source) -> list[str]:
    """The different captions of ``source`` in alphabetical order, e.g. for ``word_tokenizer``.

    Raises UserError when records of its kind have none.
    """
    if source.captions is None:
        raise UserError("this data.kind has no captions: use one that has, or a tokenizer from a folder")
    return sorted(caption for caption in source.captions.unique().to_pylist() if caption is not None)


def fingerprint_of(parts: Sequence[str | bytes]) -> str:
    """32 hexadecimal digits that change when a part, or where one part ends and the next begins, changes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
