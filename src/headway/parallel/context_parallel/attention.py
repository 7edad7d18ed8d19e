"""Attention over a sequence that several ranks share: all-to-all over heads, a ring, or rings of all-to-all groups."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from headway.parallel.context_parallel.all_to_all import heads_to_sequence, sequence_to_heads
from headway.parallel.context_parallel.block_attention import repeated
from headway.parallel.context_parallel.ranks import ContextRanks
from headway.parallel.context_parallel.ring import document_mask, ring_attention
from headway.parallel.context_parallel.split import Steps, take


def context_parallel_attention(
    ranks: ContextRanks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Steps,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's tokens to those of all ranks, (B, H, S, D); exact, with exact gradients.

    ``key`` and ``value`` are (B, G, S, D), query heads h sharing head h·G/H. ``steps``: what the queries of this ring
    part (S · all-to-all ranks) see of each part. ``documents`` (B, ring, S · all-to-all ranks): see ``ring_attention``.
    H must be a multiple of the all-to-all ranks; G need not.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    query, key, value = _to_heads(query, key, value, ranks.ulysses)
    if ranks.ring.size() > 1:
        out = ring_attention(query, key, value, steps, documents, scale, ranks.ring)
    else:
        out = _of_whole_sequence(query, key, value, steps, documents, scale)
    return heads_to_sequence(out, ranks.ulysses)


def _to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """One message: the heads for each rank, of all three, lie together in it."""
    ranks = group.size()
    if ranks == 1:
        return query, key, value
    # Fewer key heads than ranks: each is sent to all the ranks whose query heads share it.
    groups = math.lcm(key.shape[1], ranks)
    tensors = query, repeated(key, groups), repeated(value, groups)
    together = torch.cat([tensor.unflatten(1, (ranks, -1)) for tensor in tensors], 2).flatten(1, 2)
    heads = [tensor.shape[1] // ranks for tensor in tensors]
    query, key, value = sequence_to_heads(together, group).split(heads, 1)
    return query, key, value


def _of_whole_sequence(
    query: Tensor, key: Tensor, value: Tensor, steps: Steps, documents: Tensor | None, scale: float
) -> Tensor:
    ((block,),) = steps
    key, value = (take(tensor, block.keys, dim=2) for tensor in (key, value))
    if documents is None:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=block.causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
    of_queries = documents[:, 0]
    mask = document_mask(of_queries, take(of_queries, block.keys, dim=1), block.causal)
    # The fused operators that take a mask do not know grouped heads.
    key, value = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
