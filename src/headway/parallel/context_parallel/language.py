"""Context parallelism of transformers' language models: attention by registry, and each rank's part of a batch."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import AttentionInterface

from headway.parallel.context_parallel.attention import context_parallel_attention
from headway.parallel.context_parallel.ranks import ContextRanks
from headway.parallel.context_parallel.split import CausalSplit, take

_applied = itertools.count()


class SequenceSplit:
    """This rank's part of sequences of tokens that see only earlier ones. All ranks of ``cp`` hold the whole batch.

    Each rank's number of tokens is a multiple of ``local_multiple``: sequence parallelism splits them further.
    """

    def __init__(self, cp: DeviceMesh, local_multiple: int = 1) -> None:
        self.ranks = ContextRanks.of(cp)
        self._split = CausalSplit(self.ranks.ring.size(), self.ranks.ulysses.size(), local_multiple)

    def shard(self, tensor: Tensor, fill: int, dim: int = 1) -> Tensor:
        """This rank's tokens along ``dim``; a length that does not divide is padded at the end with ``fill``."""
        padded = self._padded(tensor, fill, dim)
        place = self.ranks.ring.rank(), self.ranks.ulysses.rank()
        return take(padded, self._split.piece(padded.shape[dim], *place), dim)

    def batch(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, *, ignore_index: int, packed: bool
    ) -> dict[str, Tensor]:
        """This rank's part of ``input_ids``, ``labels`` and ``position_ids`` (B, L), and ``document_ids``.

        Labels are those of the whole sequence, already shifted. Padding has labels that are ignored. ``document_ids``
        (B, padded L) int64 tells the documents of all tokens, in the order of the ring's parts; it is left out unless
        ``packed``: then every row is one document. All but the labels go to the model as keywords.
        """
        part = {
            "input_ids": self.shard(input_ids, 0),
            "labels": self.shard(labels, ignore_index),
            "position_ids": self.shard(position_ids, 0),
        }
        return part | {"document_ids": self._documents(position_ids)} if packed else part

    def _documents(self, position_ids: Tensor) -> Tensor:
        positions = self._padded(position_ids, 0, 1)
        first = torch.zeros_like(positions[:, :1])
        documents = torch.cat([first, (positions.diff(dim=1) != 1).cumsum(1)], 1)
        parts = [self._split.part(documents.shape[1], rank) for rank in range(self.ranks.ring.size())]
        return take(documents, list(itertools.chain(*parts)), 1)

    def _padded(self, tensor: Tensor, fill: int, dim: int) -> Tensor:
        missing = self._split.padded(tensor.shape[dim]) - tensor.shape[dim]
        after = (0, 0) * (tensor.dim() - 1 - dim)
        return functional.pad(tensor, (*after, 0, missing), value=fill) if missing else tensor

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        document_ids: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Causal attention as transformers calls it: (B, H, S, D) in, (B, S, H, D) out."""
        ring = self.ranks.ring
        steps = self._split.steps(query.shape[2] * self.ranks.size, ring.rank())
        documents = None if document_ids is None else document_ids.unflatten(1, (ring.size(), -1))
        out = context_parallel_attention(self.ranks, query, key, value, steps, documents, scaling)
        return out.transpose(1, 2).contiguous(), None


def apply_context_parallel_language(model: Any, cp: DeviceMesh, local_multiple: int = 1) -> SequenceSplit:
    """Let the attention of a causal language model of transformers reach over the ranks of ``cp``.

    The model must then be called with what ``SequenceSplit.batch`` returns, labels apart, with ``document_ids`` = None
    where it returns none, and without attention mask. Each rank's logits and loss are those of its own tokens;
    gradients of parameters are parts that sum up over ``cp``.
    """
    split = SequenceSplit(cp, local_multiple)
    # A registry of functions by name, shared by all models of the process: each application has a name of its own.
    name = f"context_parallel_{next(_applied)}"
    AttentionInterface.register(name, split.attention)
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    return split


def _check_inputs(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """transformers makes no masks for attention that it does not know: what it would have read there must be told."""
    if keywords.get("attention_mask") is not None:
        raise ValueError("attention_mask is not seen by context-parallel attention: give document_ids")
    for name in ("position_ids", "document_ids"):
        if name not in keywords:
            raise ValueError(f"{name} must be given to a context-parallel model: see SequenceSplit.batch")
