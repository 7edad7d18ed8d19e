"""One record, one batch, and the error that names a record which cannot be used."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from PIL import Image


class BadRecord(Exception):  # noqa: N818 - the name says what it is about: a record of the data, not our program
    """A record that cannot be used: ``record`` names it (file, member, line), ``reason`` says why."""

    def __init__(self, record: str, reason: str) -> None:
        super().__init__(record, reason)
        self.record = record
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.record}: {self.reason}"


class UnfitSample(Exception):  # noqa: N818
    """Raised by a collate function: the sample at ``place`` of its batch cannot be used, as ``bad`` says."""

    def __init__(self, place: int, bad: BadRecord) -> None:
        super().__init__(place, bad)
        self.place = place
        self.bad = bad


@dataclass(slots=True)
class Conversation:
    """Messages as transformers' chat templates take them, and the pictures of their ``image`` parts in order.

    ``messages``: ``[{"role": str, "content": [{"type": "text", "text": str} | {"type": "image"}, …]}, …]``.
    ``record`` names it (file and line).
    """

    messages: list[dict[str, Any]]
    images: list[Image.Image]
    record: str


@dataclass(slots=True)
class Sample:
    """What one record holds; a source fills the fields of its kind.

    image: uint8 (3, H, W) RGB. video: uint8 (3, F, H, W) RGB.
    tokens: int64 (L,); a text sample has up to ``sequence_length + 1`` of them: inputs and, one later, their labels.
    document_starts: int64 (D,), ascending, first 0: where in ``tokens`` a document (or the rest of one) begins.
    skipped: names of corrupt records left out of this sample (packed text), which keeps its weight.
    """

    image: torch.Tensor | None = None
    video: torch.Tensor | None = None
    caption: str | None = None
    tokens: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None
    conversation: Conversation | None = None
    skipped: tuple[str, ...] = ()


@dataclass(slots=True)
class Batch:
    """One micro-batch of one data rank.

    tensors: what ``collate`` made, and ``weight``: float32 (B,), 0 where the record is corrupt.
    positions: global positions of the B samples. bad_records: what was corrupt, by name and reason.
    """

    tensors: dict[str, torch.Tensor]
    positions: list[int]
    bad_records: list[str] = field(default_factory=list)

    def pin_memory(self) -> Self:
        """The same batch in page-locked host memory (called by torch's DataLoader)."""
        return type(self)({k: v.pin_memory() for k, v in self.tensors.items()}, self.positions, self.bad_records)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on ``device``."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors.items()}
        return type(self)(moved, self.positions, self.bad_records)
