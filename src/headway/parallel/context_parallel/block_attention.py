"""Attention of some queries to some keys, with the log-sum-exp that joins blocks of keys, and its backward pass.

PyTorch's fused operators, called directly: ``scaled_dot_product_attention`` does not give the log-sum-exp away. Their
backward passes recompute probabilities as exp(score - log-sum-exp); given the log-sum-exp and the output over *all*
keys, each yields its block's share of the gradients (Liu et al. 2023, Ring Attention, arXiv 2310.01889).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

NEVER = -1e30
"""Added to the score of a pair that is not seen. Finite: a query that sees nothing of a block gives no NaN, and what it
gives has a log-sum-exp that makes it count nothing."""

_aten = torch.ops.aten


class Attended(NamedTuple):
    """A block's output (B, H, Q, D), its log-sum-exp (B, H, Q) float32, and the operator's unused random state."""

    out: Tensor
    log_sum: Tensor
    random: tuple[Tensor, ...]


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Attended:
    """Attention of (B, H, Q, D) to (B, H or fewer, K, D). ``bias`` (B, 1, Q, K) is added to the scores.

    With ``causal`` Q = K and there is no bias.
    """
    if query.device.type == "cpu":
        heads = query.shape[1]
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, repeated(key, heads), repeated(value, heads), 0.0, causal, attn_mask=bias, scale=scale
        )
        return Attended(out, log_sum, ())
    if _flash(query, bias):
        out, log_sum, _, _, _, _, *random, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return Attended(out, log_sum, tuple(random))
    heads = query.shape[1]
    out, log_sum, *random = _aten._scaled_dot_product_efficient_attention(
        query, repeated(key, heads), repeated(value, heads), _aligned(bias, heads), True, 0.0, causal, scale=scale
    )
    return Attended(out, log_sum[:, :, : query.shape[2]], tuple(random))


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``attended`` holds output and log-sum-exp of the queries over all keys.

    Those of key and value are float32 where heads were summed up.
    """
    out, log_sum, random = attended
    heads, groups = query.shape[1], key.shape[1]
    if query.device.type == "cpu":
        result = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, repeated(key, heads), repeated(value, heads), out, log_sum, 0.0, causal,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
    elif _flash(query, bias):
        result = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, log_sum.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
            causal, *random, scale=scale,
        )  # fmt: skip
    else:
        *result, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, repeated(key, heads), repeated(value, heads), _aligned(bias, heads), out,
            functional.pad(log_sum, (0, -log_sum.shape[2] % 32), value=torch.inf), *random, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
    query_gradient, key_gradient, value_gradient = result
    return query_gradient, _summed(key_gradient, groups), _summed(value_gradient, groups)


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """(B, G, K, D) to (B, ``heads``, K, D): each group's head for all the query heads that share it."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _summed(tensor: Tensor, groups: int) -> Tensor:
    """(B, H, K, D) to (B, ``groups``, K, D) float32: the gradient of ``repeated``."""
    return tensor if tensor.shape[1] == groups else tensor.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32)


def _flash(query: Tensor, bias: Tensor | None) -> bool:
    """Whether flash attention takes it; it knows grouped heads, but no bias and no float32."""
    fits = query.shape[3] % 8 == 0 and query.shape[3] <= 256
    return fits and bias is None and query.dtype in (torch.bfloat16, torch.float16)


def _aligned(bias: Tensor | None, heads: int) -> Tensor | None:
    """The memory-efficient operator wants a bias for each head, and rows that start at multiples of 16 bytes."""
    if bias is None:
        return None
    keys = bias.shape[3]
    return functional.pad(bias, (0, -keys % 8))[..., :keys].expand(-1, heads, -1, -1)
