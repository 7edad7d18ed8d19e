"""Next-token prediction: cross-entropy summed over the tokens that count."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from headway.data import Batch, Sample
from headway.models import next_token_logits
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


class NextToken(Objective[Batch]):
    """Σ over tokens that count of -log p(token)."""

    def __init__(self, objective: NextTokenRecipe | VisionLanguageRecipe) -> None:
        self.ignore_index = objective.ignore_index

    def weight(self, batch: Batch) -> torch.Tensor:
        """Tokens that count: labels that are not ignored, of samples that are not corrupt. float32 scalar."""
        counted = batch.tensors["labels"] != self.ignore_index
        return (counted.sum(1) * batch.tensors["weight"]).sum()

    def tokens(self, batch: Batch) -> int:
        """Tokens that the model sees for this micro-batch, padding included."""
        return batch.tensors["input_ids"].numel()

    def prepare(self, batch: Batch) -> Batch:
        """See Objective."""
        return batch

    def predict(self, model: nn.Module, prepared: Batch) -> torch.Tensor:
        """Logits (B, L, V)."""
        return next_token_logits(model, prepared.tensors["input_ids"], prepared.tensors["position_ids"])

    def loss_of(self, prediction: torch.Tensor, prepared: Batch) -> torch.Tensor:
        """The sum over the micro-batch, a float32 scalar to be divided by the global number of tokens that count."""
        corrupt = (prepared.tensors["weight"] == 0).unsqueeze(1)
        labels = prepared.tensors["labels"].masked_fill(corrupt, self.ignore_index)
        return functional.cross_entropy(
            prediction.float().flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
