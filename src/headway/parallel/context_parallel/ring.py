"""Ring attention: keys and values go round the ranks, each rank's queries meet those of all (arXiv 2310.01889).

Messages of a rank, with k the bytes of its keys and values and n the ranks: forward (n - 1) k; backward (n - 1) k, and
n times their gradients in float32.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.parallel.context_parallel.block_attention import NEVER, Attended, attend, attend_backward
from headway.parallel.context_parallel.split import WHOLE, Block, Steps, take

RING_OPERATORS = frozenset(
    {
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What a ring does at every step. Selective activation checkpointing must not keep the results of all steps: together
they are as large as the keys and outputs of the whole sequence, on every rank."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Steps,
    documents: Tensor | None,
    scale: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention of this rank's queries (B, H, S, D) to the keys (B, G, S, D) of all ranks, G a divisor of H.

    ``steps`` has an entry for each rank. ``documents`` (B, ranks, S) int64, if given, holds the document of each rank's
    tokens: tokens see only their own. A query must see at least one key.
    """
    out: Tensor = _Ring.apply(query, key, value, documents, steps, scale, group)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        steps: Steps,
        scale: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        rank, ranks = group.rank(), group.size()
        out = torch.zeros_like(query, dtype=torch.float32)
        # In float64: an error in it is a relative error of all probabilities, and every step would add one.
        log_sum = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64, device=query.device)
        random: tuple[Tensor, ...] = ()
        moving = torch.stack([key, value])
        for step in range(ranks):
            coming = pass_on(moving, group) if step < ranks - 1 else None
            source = (rank - step) % ranks
            for block in steps[source]:
                keys, values = take(moving, block.keys, dim=3)
                bias = _bias(documents, rank, source, block, query.dtype)
                part = attend(query[:, :, block.queries], keys, values, bias, block.causal and bias is None, scale)
                _merge(out[:, :, block.queries], log_sum[:, :, block.queries], part)
                random = part.random
            moving = arrived(coming) if coming is not None else moving
        out = out.to(query.dtype)
        ctx.steps, ctx.scale, ctx.group = steps, scale, group
        ctx.save_for_backward(query, key, value, documents, out, log_sum.float(), *random)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, documents, out, log_sum, *random = ctx.saved_tensors
        group, (gradient,) = ctx.group, gradients
        rank, ranks = group.rank(), group.size()
        query_gradient = torch.zeros_like(query, dtype=torch.float32)
        moving = torch.stack([key, value])
        behind: Tensor | None = None
        for step in range(ranks):
            coming = pass_on(moving, group) if step < ranks - 1 else None
            source = (rank - step) % ranks
            own = torch.zeros_like(moving, dtype=torch.float32)
            for block in ctx.steps[source]:
                keys, values = take(moving, block.keys, dim=3)
                bias = _bias(documents, rank, source, block, query.dtype)
                seen = block.queries
                whole = Attended(out[:, :, seen], log_sum[:, :, seen], tuple(random))
                for_query, *for_keys = attend_backward(
                    gradient[:, :, seen], query[:, :, seen], keys, values, whole, bias,
                    block.causal and bias is None, ctx.scale,
                )  # fmt: skip
                query_gradient[:, :, seen] += for_query
                _add(own, torch.stack(for_keys), block.keys)
            # The gradients of a rank's keys follow them round the ring, a step behind, and come home at the end.
            behind = pass_on(own if behind is None else own.add_(arrived(behind)), group)
            moving = arrived(coming) if coming is not None else moving
        assert behind is not None
        key_gradient, value_gradient = arrived(behind).to(key.dtype)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None, None, None, None


def pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank of the ring; what comes from the one before is there after ``arrived``."""
    ranks, rows = group.size(), tensor.shape[0]
    sent, received = [0] * ranks, [0] * ranks
    sent[(group.rank() + 1) % ranks] = rows
    received[(group.rank() - 1) % ranks] = rows
    result: Tensor = torch.ops._c10d_functional.all_to_all_single(tensor, received, sent, group.group_name)
    return result


def arrived(tensor: Tensor) -> Tensor:
    """Wait for what ``pass_on`` returned."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def _bias(documents: Tensor | None, rank: int, source: int, block: Block, dtype: torch.dtype) -> Tensor | None:
    """(B, 1, Q, K): 0 where a query sees a key of its own document, NEVER elsewhere. None without documents."""
    if documents is None:
        return None
    queries = documents[:, rank, block.queries]
    seen = document_mask(queries, take(documents[:, source], block.keys, dim=1), block.causal)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, NEVER)


def document_mask(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """(B, 1, Q, K) bool, from the documents of queries (B, Q) and keys (B, K)."""
    seen = queries.unsqueeze(2) == keys.unsqueeze(1)
    return (seen.tril() if causal else seen).unsqueeze(1)


def _merge(out: Tensor, log_sum: Tensor, part: Attended) -> None:
    """Join a block to the output (B, H, Q, D) float32 and log-sum-exp (B, H, Q) float64 so far, in place."""
    joined = torch.logaddexp(log_sum, part.log_sum.double())
    out.mul_((log_sum - joined).exp_().float().unsqueeze(3))
    out.add_(part.out * (part.log_sum - joined).exp_().float().unsqueeze(3))
    log_sum.copy_(joined)


def _add(total: Tensor, part: Tensor, keys: tuple[slice, ...]) -> None:
    """Add gradients of the taken keys and values (2, B, G, K, D) to those of all, in place."""
    if keys == (WHOLE,):
        total += part
        return
    start = 0
    for piece in keys:
        stop = start + piece.stop - piece.start
        total[:, :, :, piece] += part[:, :, :, start:stop]
        start = stop
