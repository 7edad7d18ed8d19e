"""Norm and rotation of heads in plain PyTorch: what every device without a kernel runs, and what it is held to.

For the queries (or keys) x of a token, over the channels of one head or of all heads, then for each rotated pair (a, b)
of a head's channels, with the angle θ of the token's position:

    n = x / sqrt(mean(x²) + ε)      u = n · w      (a, b) ← (a·cos θ − b·sin θ,  a·sin θ + b·cos θ)

"interleaved" pairs are channels (2i, 2i + 1), "half" ones (i, i + pairs); channels beyond 2·pairs are not rotated.
RoFormer (Su et al., 2021); norms of heads: Dehghani et al., 2023. In float32 (float64 for float64), rounded once.
"""

import torch
from torch import Tensor

from headway.kernels.wide import wide_dtype


def forward(
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
    """Return both streams' heads one after another, [samples, tokens of both, heads, channels]."""
    wide = wide_dtype(first.dtype)
    parts = []
    for x, weight in _streams(first, second, first_weight, second_weight):
        values = x.to(wide)
        if weight is not None:
            values = values * _deviation(values, across, epsilon) * _by_head(weight, values)
        parts.append(values)
    return _rotated(torch.cat(parts, 1), cos, sin, interleaved).to(first.dtype).contiguous()


def backward(
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
    """Return the gradients of both streams and of both weights; empty for what there is not.

    With v = Rᵀ·dy and d = v·w:  dx = (d − n·mean(d·n)) / rms;  dw = Σ v·n over tokens (and heads).
    """
    wide = wide_dtype(first.dtype)
    whole = _rotated(grad.to(wide), cos, None if sin is None else -sin, interleaved)
    streams = _streams(first, second, first_weight, second_weight)
    tokens = [x.shape[1] for x, _ in streams]
    results = [first.new_empty(0) for _ in range(4)]
    for number, ((x, weight), upstream) in enumerate(zip(streams, whole.split(tokens, 1), strict=True)):
        if weight is not None:
            values = x.to(wide)
            deviation = _deviation(values, across, epsilon)
            normed = values * deviation
            channels = (2, 3) if across else (3,)
            grad_normed = upstream * _by_head(weight, values)
            mean = (grad_normed * normed).mean(channels, keepdim=True)
            summed = (upstream * normed).sum((0, 1) if across else (0, 1, 2)).flatten()
            upstream = deviation * (grad_normed - normed * mean)
            results[2 + number] = summed.to(weight.dtype)
        results[number] = x.new_empty(x.shape).copy_(upstream)
    return results[0], results[1], results[2], results[3]


def _streams(
    first: Tensor, second: Tensor | None, first_weight: Tensor | None, second_weight: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    return [(first, first_weight), *([] if second is None else [(second, second_weight)])]


def _deviation(values: Tensor, across: bool, epsilon: float) -> Tensor:
    return torch.rsqrt(values.square().mean((2, 3) if across else 3, keepdim=True) + epsilon)


def _by_head(weight: Tensor, values: Tensor) -> Tensor:
    """[heads or 1, channels], wide."""
    return weight.to(values.dtype).view(-1, values.shape[3])


def _rotated(values: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    if cos is None or sin is None:
        return values
    pairs = cos.shape[-1]
    cos, sin = (table.to(values.dtype)[:, :, None] for table in (cos, sin))
    turned, rest = values[..., : 2 * pairs], values[..., 2 * pairs :]
    a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    both = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([turned, rest], -1)
