"""Residual and RMSNorm in plain PyTorch: what every device without a kernel runs, and what the kernel is held to.

For each token, with weight w and an offset c (1 for norms that keep w - 1, as Gemma's do; else 0):

    h = x + branch              n = h / sqrt(mean(h²) + ε)              o = n · (c + w)

Sums and products are in float32 (float64 for float64 inputs), and o is rounded once. h is rounded to the dtype of x
before it is normed, because the rounded h is what the model's residual stream carries on and what backward reads.
"""

import torch
from torch import Tensor

from headway.kernels.wide import wide_dtype


def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h (empty without a branch), o, and 1/rms of each token [samples, tokens], wide."""
    wide = wide_dtype(x.dtype)
    hidden = x if branch is None else (x.to(wide) + branch.to(wide)).to(x.dtype)
    values = hidden.to(wide)
    rstd = torch.rsqrt(values.square().mean(-1) + epsilon)
    output = values * rstd[..., None] * (offset + weight.to(wide))
    kept = x.new_empty(0) if branch is None else hidden.contiguous()
    return kept, output.to(x.dtype).contiguous(), rstd


def backward(
    grad_hidden: Tensor | None, grad_output: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of h, which is that of x and of the branch, and of the weight.

    There is a ``grad_hidden`` where there is a branch. With d = do·(c + w):
    dh = dh' + (d − n·mean(d·n)) / rms;  dw = Σ do·n over all tokens.
    """
    wide = rstd.dtype
    normed = hidden.to(wide) * rstd[..., None]
    upstream = grad_output.to(wide)
    grad_normed = upstream * (offset + weight.to(wide))
    grad = rstd[..., None] * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    if grad_hidden is not None:
        grad = grad + grad_hidden.to(wide)
    return grad.to(hidden.dtype).contiguous(), (upstream * normed).sum((0, 1)).to(weight.dtype)
