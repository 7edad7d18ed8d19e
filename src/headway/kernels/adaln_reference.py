"""adaLN in plain PyTorch: what every device without a kernel runs, and what the kernel is held to.

Gated residual, norm, modulate, for token l of sample b, with g, s, t the rows of gate, scale and shift that l reads
(g = 1 without a gate, no branch added without a branch):

    h = x + g · branch          n = (h − mean(h)) / sqrt(var(h) + ε)          o = n · (1 + s) + t

"rms" leaves out the mean. Products and sums are in float32 (float64 for float64 inputs); h is rounded to the dtype of x
before it is normed, because the rounded h is what the model's residual stream carries on and what backward reads.
"""

import torch
from torch import Tensor

from headway.kernels.wide import wide_dtype


def forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, norm: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h (empty without a branch), o, mean and 1/deviation of each token [samples, tokens], the last two wide."""
    wide = wide_dtype(x.dtype)
    hidden = x
    if branch is not None:
        added = branch.to(wide)
        if gate is not None:
            added = (_by_group(added, gate) * _rows(gate, wide)).flatten(1, 2)
        hidden = (x.to(wide) + added).to(x.dtype)
    values = hidden.to(wide)
    mean = values.mean(-1) if norm == "layer" else values.new_zeros(values.shape[:2])
    centred = values - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(-1) + epsilon)
    normed = _by_group(centred * rstd[..., None], scale)
    output = torch.addcmul(_rows(shift, wide), normed, 1 + _rows(scale, wide)).flatten(1, 2)
    kept = x.new_empty(0) if branch is None else hidden.contiguous()
    return kept, output.to(x.dtype).contiguous(), mean, rstd


def backward(
    grad_hidden: Tensor | None,
    grad_output: Tensor,
    hidden: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, branch, gate (both empty without a gate), scale and shift.

    There is a ``grad_hidden`` where a branch was added; without one, ``hidden`` is x. Branch and gate are given
    together: of a branch that was added without a gate the gradient is that of x.

    With d = do·(1 + s):  dh = dh' + (d − mean(d) − n·mean(d·n)) / deviation;  dx = dh;  dbranch = g·dh;
    dg = Σ dh·branch;  ds = Σ do·n;  dt = Σ do; sums run over the tokens that read a row.
    """
    wide = rstd.dtype
    normed = (hidden.to(wide) - mean[..., None]) * rstd[..., None]
    upstream = _by_group(grad_output.to(wide), scale)
    grad_normed = (upstream * (1 + _rows(scale, wide))).flatten(1, 2)
    projected = normed * (grad_normed * normed).mean(-1, keepdim=True)
    if norm == "layer":
        projected = projected + grad_normed.mean(-1, keepdim=True)
    grad = rstd[..., None] * (grad_normed - projected)
    grad_scale = (upstream * _by_group(normed, scale)).sum(2).to(scale.dtype)
    grad_shift = upstream.sum(2).to(scale.dtype)
    if grad_hidden is not None:
        grad = grad + grad_hidden.to(wide)
    if branch is None or gate is None:
        return grad.to(hidden.dtype), hidden.new_empty(0), scale.new_empty(0), grad_scale, grad_shift
    grouped = _by_group(grad, gate)
    grad_branch = (grouped * _rows(gate, wide)).flatten(1, 2).to(hidden.dtype)
    grad_gate = (grouped * _by_group(branch.to(wide), gate)).sum(2).to(gate.dtype)
    return grad.to(hidden.dtype), grad_branch, grad_gate, grad_scale, grad_shift


def _by_group(tokens: Tensor, parameter: Tensor) -> Tensor:
    """[samples, tokens, width] -> [samples, rows of ``parameter``, tokens that read one, width]."""
    samples, length, width = tokens.shape
    rows = parameter.shape[1]
    return tokens.reshape(samples, rows, length // rows if rows else 0, width)


def _rows(parameter: Tensor, wide: torch.dtype) -> Tensor:
    return parameter.to(wide)[:, :, None]
