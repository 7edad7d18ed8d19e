"""Residual and RMSNorm as one operator, forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from headway.kernels import rms_norm_reference
from headway.kernels.wide import wide_dtype


def rms_norm(
    x: Tensor, weight: Tensor, *, branch: Tensor | None = None, epsilon: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the residual stream h = x + branch (x itself without a branch) and rms(h)·(offset + weight).

    Args:
        x, branch: [tokens, width] or [samples, tokens, width], of one dtype, which is that of both results.
        weight: [width], of any floating dtype.
        offset: 1 for norms that keep their weight less one.
    Raises:
        ValueError: shapes or dtypes do not go together.
    Inputs are never written to and may have any strides. Sums are in float32 (float64 if x is), the weight's gradient
    in a fixed order: the same bits in every run.
    """
    if x.ndim not in (2, 3) or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x {list(x.shape)} is not [(samples,) tokens, width] of weight {list(weight.shape)}"
        )
    if branch is not None and (branch.shape != x.shape or branch.dtype != x.dtype):
        raise ValueError("rms_norm: branch has not the shape and dtype of x")
    one = x.ndim == 2
    tokens, added = (t.unsqueeze(0) if one and t is not None else t for t in (x, branch))
    assert tokens is not None
    hidden, output, _ = rms_norm_forward(tokens, added, weight, epsilon, offset)
    if branch is None:
        hidden = tokens
    return (hidden[0], output[0]) if one else (hidden, output)


@torch.library.custom_op("headway::rms_norm", mutates_args=())
def rms_norm_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h (empty without a branch), output and 1/rms of each token."""
    return rms_norm_reference.forward(x, branch, weight, epsilon, offset)


@torch.library.custom_op("headway::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad_hidden: Tensor | None, grad_output: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x (and of the branch, which has the same) and of the weight."""
    return rms_norm_reference.backward(grad_hidden, grad_output, hidden, weight, rstd, offset)


@rms_norm_forward.register_kernel("cuda")
def _(x, branch, weight, epsilon, offset):
    from headway.kernels import rms_norm_triton

    way = rms_norm_triton if rms_norm_triton.fits(x) else rms_norm_reference
    return way.forward(x, branch, weight, epsilon, offset)


@rms_norm_backward.register_kernel("cuda")
def _(grad_hidden, grad_output, hidden, weight, rstd, offset):
    from headway.kernels import rms_norm_triton

    way = rms_norm_triton if rms_norm_triton.fits(hidden) else rms_norm_reference
    return way.backward(grad_hidden, grad_output, hidden, weight, rstd, offset)


@rms_norm_forward.register_fake
def _(x, branch, weight, epsilon, offset):
    hidden = x.new_empty(0 if branch is None else x.shape)
    return hidden, x.new_empty(x.shape), x.new_empty(x.shape[:2], dtype=wide_dtype(x.dtype))


@rms_norm_backward.register_fake
def _(grad_hidden, grad_output, hidden, weight, rstd, offset):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, weight, _, offset = inputs
    hidden, _, rstd = output
    ctx.save_for_backward(x if branch is None else hidden, weight, rstd)
    ctx.added, ctx.offset = branch is not None, offset
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)  # zeros made for a DTensor that no one used would be a plain tensor


def _differentiate(
    ctx: Any, grad_hidden: Tensor | None, grad_output: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    hidden, weight, rstd = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(hidden)
    if not ctx.added:
        grad_hidden = None
    elif grad_hidden is None:
        grad_hidden = torch.zeros_like(hidden)
    x, grad_weight = rms_norm_backward(grad_hidden, grad_output, hidden, weight, rstd, ctx.offset)
    return x, x if ctx.added else None, grad_weight, None, None


rms_norm_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)

WAYS: tuple[tuple[Placement, Placement], ...] = (
    (Replicate(), Replicate()),
    (Shard(0), Partial()),
    (Shard(1), Partial()),
)
"""To split the work over a mesh axis: placements of tokens, and of the weight's gradient; the weight is whole."""


@register_sharding(torch.ops.headway.rms_norm.default)
def _(x, branch, weight, epsilon, offset):
    added = branch is not None
    return [
        (
            [tokens if added else Replicate(), tokens, tokens],
            [tokens, tokens if added else None, Replicate(), None, None],
        )
        for tokens, _ in WAYS
    ]


@register_sharding(torch.ops.headway.rms_norm_backward.default)
def _(grad_hidden, grad_output, hidden, weight, rstd, offset):
    added = grad_hidden is not None
    return [
        ([tokens, grad], [tokens if added else None, tokens, tokens, Replicate(), tokens, None])
        for tokens, grad in WAYS
    ]
