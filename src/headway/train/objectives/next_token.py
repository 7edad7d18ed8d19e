"""Next-token prediction: cross-entropy summed over the tokens that count."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from headway.data import Batch, Sample
from headway.models import next_token_logits
from headway.parallel import cross_entropy_sum
from headway.parallel.context_parallel import SequenceSplit
from headway.recipe import NextTokenRecipe, VisionLanguageRecipe
from headway.train.objectives.objective import Objective

PAD_MULTIPLE = 64
"""Unpacked sequences are padded to the longest of their micro-batch, rounded up to this, so that few shapes occur."""


@dataclass(frozen=True)
class NextTokenCollate:
    """Documents, packed or one a sample, to one micro-batch."""

    objective: NextTokenRecipe
    sequence_length: int
    packing: bool
    pad_token: int

    def __call__(self, samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
        """``input_ids``, ``labels`` and ``position_ids``, int64 (B, L).

        Positions restart at each document, which is how transformers' attention learns where documents end. The last
        token of a document predicts nothing: the next document's first token cannot be known from it.
        """
        rows = [self._row(sample) for sample in samples]
        length = self.sequence_length if self.packing else rounded_up(max(len(row[0]) for row in rows))
        length = min(length, self.sequence_length)
        fills = (self.pad_token, self.objective.ignore_index)
        ids, labels = (
            torch.stack([functional.pad(row[i], (0, length - len(row[i])), value=fills[i]) for row in rows])
            for i in range(2)
        )
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": torch.stack([_positions(row[2], length) for row in rows]),
            "weight": torch.ones(len(samples)),
        }

    def _row(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(inputs (l,), labels (l,), document starts within the inputs) of a sample of l + 1 tokens."""
        assert sample.tokens is not None
        tokens = sample.tokens
        starts = sample.document_starts if sample.document_starts is not None else torch.zeros(1, dtype=torch.int64)
        labels = tokens[1:].clone()
        labels[starts[starts > 0] - 1] = self.objective.ignore_index
        return tokens[:-1], labels, starts[starts < len(tokens) - 1]


def rounded_up(length: int) -> int:
    """``length`` up to the next multiple of ``PAD_MULTIPLE``."""
    return max(PAD_MULTIPLE, -(-length // PAD_MULTIPLE) * PAD_MULTIPLE)


def _positions(starts: torch.Tensor, length: int) -> torch.Tensor:
    """0, 1, 2, … from each start on, int64 (length,)."""
    counter = torch.arange(length)
    origin = torch.zeros(length, dtype=torch.int64)
    origin[starts] = starts
    return counter - origin.cummax(0).values


Tensors = dict[str, torch.Tensor]


class NextToken(Objective[Tensors]):
    """Σ over tokens that count of -log p(token)."""

    def __init__(
        self,
        objective: NextTokenRecipe | VisionLanguageRecipe,
        sequence: SequenceSplit | None = None,
        *,
        packed: bool,
        routed: bool = False,
    ) -> None:
        """``sequence``: how ranks share each sequence, if they do; ``packed``: several documents in one.

        ``routed``: the blocks take ``routed_tokens``, nonzero for tokens that count.
        """
        self.ignore_index = objective.ignore_index
        self.sequence = sequence
        self.packed = packed
        self.routed = routed

    def weight(self, batch: Batch) -> torch.Tensor:
        """Tokens that count: labels that are not ignored, of samples that are not corrupt. float32 scalar."""
        counted = batch.tensors["labels"] != self.ignore_index
        return (counted.sum(1) * batch.tensors["weight"]).sum()

    def tokens(self, batch: Batch) -> int:
        """Tokens that the model sees for this micro-batch, padding included."""
        return batch.tensors["input_ids"].numel()

    def prepare(self, batch: Batch) -> Tensors:
        """The batch's tensors, labels of corrupt samples ignored; this rank's tokens where sequences are shared."""
        corrupt = (batch.tensors["weight"] == 0).unsqueeze(1)
        tensors = batch.tensors | {"labels": batch.tensors["labels"].masked_fill(corrupt, self.ignore_index)}
        if self.sequence is None:
            return tensors
        whole = (tensors[name] for name in ("input_ids", "labels", "position_ids"))
        return tensors | self.sequence.batch(*whole, ignore_index=self.ignore_index, packed=self.packed)

    def predict(self, model: nn.Module, prepared: Tensors) -> torch.Tensor:
        """Logits (B, L, V)."""
        further: dict[str, torch.Tensor | None] = {}
        if self.sequence is not None:
            further["document_ids"] = prepared.get("document_ids")
        if self.routed:
            further["routed_tokens"] = prepared["labels"] != self.ignore_index
        return next_token_logits(model, prepared["input_ids"], prepared["position_ids"], **further)

    def loss_of(self, prediction: torch.Tensor, prepared: Tensors) -> torch.Tensor:
        """The sum over the micro-batch, a float32 scalar to be divided by the global number of tokens that count."""
        return cross_entropy_sum(prediction, prepared["labels"], self.ignore_index)
