"""Conversations with pictures: cross-entropy summed over the tokens of the assistant's answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import nn
from torch.nn import functional
from transformers import AutoImageProcessor, AutoTokenizer

from headway.data import BadRecord, Conversation, Sample, UnfitSample
from headway.errors import UserError
from headway.models import vision_language_logits
from headway.recipe import VisionLanguageRecipe
from headway.train.objectives.next_token import NextToken, Tensors, rounded_up

INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")


class _Row(NamedTuple):
    """One conversation: ids, labels and picture marks, int64 (L,); patches (P, features) and grids (3,) by picture."""

    ids: torch.Tensor
    labels: torch.Tensor
    is_picture: torch.Tensor
    patches: list[torch.Tensor]
    grids: list[torch.Tensor]


@dataclass(frozen=True)
class VisionLanguageCollate:
    """Conversations to one micro-batch, with the tokenizer, chat template and image processor of a local folder.

    The parts of a transformers processor are used one by one: the whole would ask for its video processor's libraries,
    and does not tell which tokens are answers.
    """

    objective: VisionLanguageRecipe
    tokenizer: Any
    image_processor: Any
    image_token: int
    sequence_length: int

    def __call__(self, samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
        """What the model takes (``INPUTS``, padded on the right) and ``labels`` int64 (B, L).

        ``pixel_values`` (patches, features) and ``image_grid_thw`` (pictures, 3) are there when a picture is.
        Raises UnfitSample for a conversation or picture that the template or the image processor refuses.
        """
        rows = [self._usable_row(place, sample) for place, sample in enumerate(samples)]
        length = min(self.sequence_length, rounded_up(max(len(row.ids) for row in rows)))

        def padded(parts: list[torch.Tensor], fill: int) -> torch.Tensor:
            return torch.stack([functional.pad(part, (0, length - len(part)), value=fill) for part in parts])

        batch = {
            "input_ids": padded([row.ids for row in rows], self.tokenizer.pad_token_id),
            "attention_mask": padded([torch.ones_like(row.ids) for row in rows], 0),
            "mm_token_type_ids": padded([row.is_picture for row in rows], 0),
            "labels": padded([row.labels for row in rows], self.objective.ignore_index),
            "weight": torch.ones(len(rows)),
        }
        if any(row.grids for row in rows):
            batch["pixel_values"] = torch.cat([patches for row in rows for patches in row.patches])
            batch["image_grid_thw"] = torch.stack([grid for row in rows for grid in row.grids])
        return batch

    def _usable_row(self, place: int, sample: Sample) -> _Row:
        assert sample.conversation is not None
        try:
            return self._row(sample.conversation)
        except (ValueError, TemplateError) as error:
            reason = f"not usable as a conversation with pictures ({type(error).__name__}: {error})"
            raise UnfitSample(place, BadRecord(sample.conversation.record, reason)) from error

    def _row(self, conversation: Conversation) -> _Row:
        text, answers = self._rendered(conversation.messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        patches, grids = self._pictures(conversation.images)
        places = encoded["input_ids"].count(self.image_token)
        if places != len(grids):
            raise ValueError(f"{places} places for {len(grids)} pictures: a text may hold the picture token")
        merged = self.image_processor.merge_size**2
        pictures = iter(grids)
        ids: list[int] = []
        answer: list[bool] = []
        for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            repeats = int(next(pictures).prod()) // merged if token == self.image_token else 1
            ids += [token] * repeats
            answer += [any(first <= begin and end <= last for first, last in answers)] * repeats
        return self._cut(torch.tensor(ids), torch.tensor(answer), patches, grids)

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as the chat template writes it, and the character ranges of the assistant's answers.

        An answer is what a turn adds to the prompt for it, its closing token included. White space after that is not
        part of it: a model stops at the token, and never writes what the template puts between two turns.
        """
        text = self._template(messages, prompt=False)
        ranges = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._template(messages[:number], prompt=True)
                answered = self._template(messages[: number + 1], prompt=False).rstrip()
                if not (answered.startswith(prompt) and text.startswith(answered)):
                    raise ValueError(f"the chat template does not write message {number + 1} after the ones before it")
                ranges.append((len(prompt), len(answered)))
        return text, ranges

    def _template(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def _pictures(self, images: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each picture's patches (P, features) float32 and grid (time, height, width) int64."""
        made = [self.image_processor(images=[image], return_tensors="pt") for image in images]
        return [item["pixel_values"] for item in made], [item["image_grid_thw"][0] for item in made]

    def _cut(
        self, ids: torch.Tensor, answer: torch.Tensor, patches: list[torch.Tensor], grids: list[torch.Tensor]
    ) -> _Row:
        """At most ``sequence_length`` tokens, ending before a picture that does not fit; labels one token ahead."""
        is_picture = (ids == self.image_token).long()
        sizes = [int(grid.prod()) // self.image_processor.merge_size**2 for grid in grids]
        length = min(len(ids), self.sequence_length)
        kept, seen = len(grids), int(is_picture[:length].sum())
        if seen < sum(sizes):
            kept = next(k for k in range(len(sizes)) if sum(sizes[: k + 1]) > seen)
            first_of_cut = int((is_picture.cumsum(0) > sum(sizes[:kept])).nonzero()[0])
            length = min(length, first_of_cut)
        labels = torch.full_like(ids, self.objective.ignore_index)
        labels[:-1] = torch.where(answer[1:], ids[1:], self.objective.ignore_index)
        labels[length - 1 :] = self.objective.ignore_index
        return _Row(ids[:length], labels[:length], is_picture[:length], patches[:kept], grids[:kept])


class VisionLanguage(NextToken):
    """Σ over the tokens of answers of -log p(token)."""

    def predict(self, model: nn.Module, prepared: Tensors) -> torch.Tensor:
        """Logits (B, L, V)."""
        return vision_language_logits(model, {name: prepared[name] for name in INPUTS if name in prepared})


def open_processor(folder: Path) -> tuple[Any, Any]:
    """(tokenizer with its chat template, image processor) of a local folder. Raises UserError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        image_processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.processor = {folder}: no tokenizer and image processor to be read there: {reason}"
        ) from None
    if tokenizer.chat_template is None:
        raise UserError(f"model.processor = {folder}: its tokenizer has no chat template (chat_template.jinja)")
    return tokenizer, image_processor
