"""The vocabulary divided over ranks: embedding, head, and a cross-entropy that never gathers the logits.

A vocabulary that tp does not divide stays whole, embedding and head, on every rank.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from headway.parallel.tensor_parallel_boundaries import shared, summed
from headway.parallel.tensor_parallel_styles import Column, Division, Enter, Style, base_of, shard, with_forward


@dataclass(frozen=True)
class VocabularyEmbedding(Style):
    """An ``nn.Embedding`` of which each rank has a share of the rows."""

    def apply(self, module: Any, division: Division) -> None:
        if module.num_embeddings % division.size == 0:
            kind: Any = type(module)
            module.__class__ = _embedding_of_own_rows(kind)
            module.tensor_parallel_mesh = division.mesh
            division.give(module, weight=shard(0))


@functools.cache
def _embedding_of_own_rows(kind: Any) -> type:
    def forward(embedding: Any, ids: Tensor) -> Tensor:
        mesh, rows = embedding.tensor_parallel_mesh, embedding.weight
        first = mesh.get_local_rank() * rows.shape[0]
        own = (ids >= first) & (ids < first + rows.shape[0])
        # As in nn.Embedding, the row of padding gets no gradient.
        padding = None if embedding.padding_idx is None else embedding.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows.shape[0] else None
        found = functional.embedding(torch.where(own, ids - first, 0), rows, padding)
        return summed(torch.where(own.unsqueeze(-1), found, 0), mesh)

    return with_forward(kind, forward)


@dataclass(frozen=True)
class VocabularyHead(Style):
    """The linear that predicts tokens: its logits are a DTensor, Shard(-1) over the vocabulary."""

    def apply(self, module: Any, division: Division) -> None:
        if base_of(module).out_features % division.size == 0:
            Enter(shared).apply(module, division)
            Column().apply(module, division)
            module.register_forward_hook(functools.partial(_as_shards, mesh=division.mesh))


def _as_shards(head: Any, args: Any, logits: Tensor, *, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Σ of -log p(label) over the labels that are not ``ignore_index``: float32 scalar, the same on all ranks of tp.

    ``logits`` (…, V), plain or a DTensor divided along V over a one-dimensional mesh; ``labels`` (…) int64, whole.
    Computed in float32. Divided logits cost three numbers a token in two all-reduces, and none in backward.
    """
    if not isinstance(logits, DTensor):
        return functional.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum"
        )
    assert logits.placements == (Shard(logits.ndim - 1),)
    own = logits.to_local().flatten(0, -2)
    return _CrossEntropyOfShards.apply(own, labels.flatten(), ignore_index, logits.device_mesh)


class _CrossEntropyOfShards(torch.autograd.Function):
    """log Σ exp(logits) - logits[label], where each rank has the logits of V / n tokens of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, mesh: DeviceMesh) -> Tensor:
        """``logits`` (N, V / n) of any float dtype, ``labels`` (N,)."""
        group = mesh.get_group()
        wide = logits.float()
        largest = wide.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        column = labels - mesh.get_local_rank() * logits.shape[1]
        counted = labels != ignore_index
        own = counted & (column >= 0) & (column < logits.shape[1])
        column = torch.where(own, column, 0)
        chosen = torch.where(own, wide.gather(1, column[:, None])[:, 0], 0)
        sums = torch.stack([(wide - largest[:, None]).exp_().sum(1), chosen])
        dist.all_reduce(sums, group=group)
        total, chosen = sums
        log_total = total.log() + largest
        ctx.save_for_backward(logits, log_total, column, own, counted)
        return torch.where(counted, log_total - chosen, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """(p - [is label]) on this rank's share of the vocabulary, in the logits' dtype."""
        logits, log_total, column, own, counted = ctx.saved_tensors
        slope = (logits.float() - log_total[:, None]).exp_()
        slope.scatter_add_(1, column[:, None], -own[:, None].float())
        slope *= counted[:, None] * gradients[0]
        return slope.to(logits.dtype), None, None, None
