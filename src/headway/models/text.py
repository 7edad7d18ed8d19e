"""Captions to tokens to features: what the text encoders of a diffusion pipeline hand to the denoiser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class TextFeatures(NamedTuple):
    """One encoder's answer to a batch of captions."""

    sequence: Tensor
    """(B, L, width): one vector a token."""
    pooled: Tensor | None
    """(B, width): one vector a caption, of encoders that have one."""
    mask: Tensor
    """(B, L) bool: False on padding."""


@dataclass(frozen=True)
class CaptionTokens:
    """Turns captions into token ids for each text encoder, as the family's diffusers pipeline does. Can be pickled."""

    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    max_lengths: Mapping[str, int]
    clean: Callable[[str], str]

    def __call__(self, captions: list[str]) -> dict[str, torch.Tensor]:
        """Encoder name -> (B, max_length) int64 token ids, padded on the right and truncated."""
        cleaned = [self.clean(caption) for caption in captions]
        return {
            name: self._ids(tokenizer, cleaned, self.max_lengths[name]) for name, tokenizer in self.tokenizers.items()
        }

    @staticmethod
    def _ids(tokenizer: PreTrainedTokenizerBase, captions: list[str], length: int) -> torch.Tensor:
        batch = tokenizer(
            captions,
            padding="max_length",
            padding_side="right",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids: torch.Tensor = batch["input_ids"]
        return ids


def as_written(caption: str) -> str:
    """Captions that a pipeline hands to its tokenizers unchanged."""
    return caption
