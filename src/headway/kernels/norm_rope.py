"""Norm and rotary embedding of queries or keys, written straight into the joint sequence of two streams."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from headway.kernels import norm_rope_reference

Pairs = Literal["interleaved", "half"]


def norm_rope(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    then: Tensor | None = None,
    then_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    pairs: Pairs = "half",
    epsilon: float = 1e-6,
) -> Tensor:
    """Return RMS-normed and rotated heads of ``x`` and, behind them, of ``then``.

    Args:
        x, then: [samples, tokens, heads, channels]: two streams that attend together, or one; of one dtype.
        weight, then_weight: [channels], a norm over each head, or [heads·channels], one across all heads; None for no
            norm. Both streams have one or none has.
        cos, sin: [samples or 1, tokens of both, pairs rotated], for tables of any number of axes; None for none. Fewer
            pairs than half the channels rotate the first channels only.
        pairs: "interleaved": channels 2i and 2i + 1; "half": i and i + pairs.
    Returns:
        [samples, tokens of both, heads, channels], contiguous, of the dtype of ``x``.
    Raises:
        ValueError: shapes or dtypes do not go together.
    Inputs are never written to and may have any strides. Computed in float32 (float64 if x is), rounded once; gradients
    of weights in a fixed order: the same bits in every run. The tables get no gradient.
    """
    across = weight is not None and weight.numel() != x.shape[-1]
    _check(x, weight, then, then_weight, cos, sin, pairs)
    return norm_rope_forward(x, then, weight, then_weight, cos, sin, pairs == "interleaved", across, epsilon)


def _check(
    x: Tensor,
    weight: Tensor | None,
    then: Tensor | None,
    then_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    pairs: str,
) -> None:
    if pairs not in ("interleaved", "half"):
        raise ValueError(f"norm_rope: pairs {pairs!r} are neither 'interleaved' nor 'half'")
    if x.ndim != 4 or x.shape[3] % 2:
        raise ValueError(f"norm_rope: x {list(x.shape)} is not [samples, tokens, heads, an even number of channels]")
    heads, width = x.shape[2:]
    alike = then is None or (then.shape[0] == x.shape[0] and then.shape[2:] == x.shape[2:] and then.dtype == x.dtype)
    if not alike:
        raise ValueError("norm_rope: both streams have the same samples, heads, channels and dtype")
    if (then is None and then_weight is not None) or (then is not None and (weight is None) != (then_weight is None)):
        raise ValueError("norm_rope: both streams have a weight or none has")
    if weight is not None and weight.shape not in ((width,), (heads * width,)):
        raise ValueError(f"norm_rope: weight {list(weight.shape)} is neither [{width}] nor [{heads * width}]")
    if weight is not None and then_weight is not None and then_weight.shape != weight.shape:
        raise ValueError("norm_rope: both weights have one shape")
    if (cos is None) != (sin is None):
        raise ValueError("norm_rope: cos and sin are given together or not at all")
    if cos is None or sin is None:
        return
    tokens = x.shape[1] + (0 if then is None else then.shape[1])
    fits = cos.ndim == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == tokens
    if sin.shape != cos.shape or not fits or not 0 < cos.shape[2] <= width // 2:
        raise ValueError(f"norm_rope: cos and sin {list(cos.shape)} are not [samples or 1, {tokens}, pairs]")


@torch.library.custom_op("headway::norm_rope", mutates_args=())
def norm_rope_forward(
    first: Tensor,
    second: Tensor | None,
    first_weight: Tensor | None,
    second_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    across: bool,
    epsilon: float,
) -> Tensor:
    """Both streams, normed and rotated, one behind the other."""
    return norm_rope_reference.forward(
        first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon
    )


@torch.library.custom_op("headway::norm_rope_backward", mutates_args=())
def norm_rope_backward(
    grad: Tensor,
    first: Tensor,
    second: Tensor | None,
    first_weight: Tensor | None,
    second_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    across: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both streams and of both weights; empty for what there is not."""
    return norm_rope_reference.backward(
        grad, first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon
    )


@norm_rope_forward.register_kernel("cuda")
def _(first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon):
    from headway.kernels import norm_rope_triton

    way = norm_rope_triton if norm_rope_triton.fits(first, across) else norm_rope_reference
    return way.forward(first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon)


@norm_rope_backward.register_kernel("cuda")
def _(grad, first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon):
    from headway.kernels import norm_rope_triton

    way = norm_rope_triton if norm_rope_triton.fits(first, across) else norm_rope_reference
    return way.backward(grad, first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon)


@norm_rope_forward.register_fake
def _(first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon):
    tokens = first.shape[1] + (0 if second is None else second.shape[1])
    return first.new_empty((first.shape[0], tokens, *first.shape[2:]))


@norm_rope_backward.register_fake
def _(grad, first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon):
    return tuple(
        first.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)
        for tensor in (first, second, first_weight, second_weight)
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, interleaved, across, epsilon = inputs
    ctx.save_for_backward(*tensors)
    ctx.how = interleaved, across, epsilon


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    gradients = norm_rope_backward(grad, *saved, *ctx.how)
    given = (None if tensor is None else gradient for tensor, gradient in zip(saved, gradients, strict=False))
    return *given, None, None, None, None, None


norm_rope_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _ways(first: Any, second: Any, cos: Any, across: bool) -> list[tuple[Placement, Placement, Placement, Placement]]:
    """Ways to split over a mesh axis: placements of streams, of tables, of weights and of the weights' gradients."""
    whole = Replicate()
    by_sample = Shard(0) if cos is not None and cos.shape[0] > 1 else whole
    ways: list[tuple[Placement, Placement, Placement, Placement]] = [
        (whole, whole, whole, whole),
        (Shard(0), by_sample, whole, Partial()),
    ]
    if not across:
        ways.append((Shard(2), whole, whole, Partial()))
    if second is None:
        ways.append((Shard(1), Shard(1), whole, Partial()))
    return ways


def _if(given: Any, placement: Placement) -> Placement | None:
    return None if given is None else placement


@register_sharding(torch.ops.headway.norm_rope.default)
def _(first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon):
    return [
        (
            [streams],
            [
                streams,
                _if(second, streams),
                _if(first_weight, weights),
                _if(second_weight, weights),
                _if(cos, tables),
                _if(sin, tables),
                None,
                None,
                None,
            ],
        )
        for streams, tables, weights, _ in _ways(first, second, cos, across)
    ]


@register_sharding(torch.ops.headway.norm_rope_backward.default)
def _(grad, first, second, first_weight, second_weight, cos, sin, interleaved, across, epsilon):
    return [
        (
            [
                streams,
                _if(second, streams) or Replicate(),
                _if(first_weight, summed) or Replicate(),
                _if(second_weight, summed) or Replicate(),
            ],
            [
                streams,
                streams,
                _if(second, streams),
                _if(first_weight, weights),
                _if(second_weight, weights),
                _if(cos, tables),
                _if(sin, tables),
                None,
                None,
                None,
            ],
        )
        for streams, tables, weights, summed in _ways(first, second, cos, across)
    ]
