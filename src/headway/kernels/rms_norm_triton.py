"""Residual and RMSNorm for GPUs: one pass forward; backward in one pass and a sum of partial sums in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.rows_triton import (
    BACKWARD_PROGRAMS,
    TYPES,
    WIDEST,
    block_and_warps,
    chunked,
    combine,
    parts_of,
    unit_columns,
)


@triton.jit
def forward_kernel(
    x, branch, weight, hidden, output, rstd_out,
    x_sample, x_token, branch_sample, branch_token, tokens, width, epsilon, offset,
    ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: h, o and 1/rms. ``…_sample`` and the like are strides in elements."""
    program = tl.program_id(0).to(tl.int64)
    sample = program // tokens
    token = program % tokens
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + sample * x_sample + token * x_token + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        added = tl.load(branch + sample * branch_sample + token * branch_token + columns, mask=inside, other=0.0)
        rounded = (values + added.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + program * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    weights = offset + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = values * rstd * weights
    tl.store(output + program * width + columns, result.to(output.dtype.element_ty), mask=inside)
    tl.store(rstd_out + program, rstd)


@triton.jit
def backward_kernel(
    grad_hidden, grad_output, hidden, weight, rstd, grad_x, grad_weight,
    grad_hidden_sample, grad_hidden_token, grad_output_sample, grad_output_token, hidden_sample, hidden_token,
    all_tokens, tokens, tokens_per_chunk, width, offset,
    ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk of tokens: their gradients, and their part of the weight's."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weights = offset + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    first = program * tokens_per_chunk
    last = tl.minimum(first + tokens_per_chunk, all_tokens)
    for place in range(first, last):
        sample = place // tokens
        token = place % tokens
        upstream = tl.load(
            grad_output + sample * grad_output_sample + token * grad_output_token + columns, mask=inside, other=0.0
        ).to(tl.float32)
        normed = tl.load(hidden + sample * hidden_sample + token * hidden_token + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        deviation = tl.load(rstd + place)
        normed = normed * deviation
        weight_sum += upstream * normed
        grad = upstream * weights
        grad = deviation * (grad - normed * (tl.sum(grad * normed, 0) / width))
        if ADDED:
            grad += tl.load(
                grad_hidden + sample * grad_hidden_sample + token * grad_hidden_token + columns, mask=inside, other=0.0
            ).to(tl.float32)
        tl.store(grad_x + place * width + columns, grad.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * width + columns, weight_sum.to(grad_weight.dtype.element_ty), mask=inside)


def fits(x: Tensor) -> bool:
    """Whether these kernels take tokens like ``x`` [samples, tokens, width]."""
    return x.dtype in TYPES and 0 < x.shape[2] <= WIDEST


def forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``rms_norm_reference.forward``."""
    samples, tokens, width = x.shape
    added = branch is not None
    hidden = x.new_empty(x.shape if added else 0)
    output = x.new_empty(x.shape)
    rstd = x.new_empty((samples, tokens), dtype=torch.float32)
    if not x.numel():
        return hidden, output, rstd
    x, weight = unit_columns(x), unit_columns(weight)
    branch = x if branch is None else unit_columns(branch)
    block, warps = block_and_warps(width, "forward")
    with torch.cuda.device_of(x):
        forward_kernel[(samples * tokens,)](
            x, branch, weight, hidden, output, rstd, *x.stride()[:2], *branch.stride()[:2],
            tokens, width, epsilon, offset, ADDED=added, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return hidden, output, rstd


def backward(
    grad_hidden: Tensor | None,
    grad_output: Tensor,
    hidden: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    programs: int = BACKWARD_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """As ``rms_norm_reference.backward``, on about ``programs`` programs."""
    samples, tokens, width = hidden.shape
    added = grad_hidden is not None
    grad_x = hidden.new_empty(hidden.shape)
    grad_weight = weight.new_zeros(width)
    if not hidden.numel():
        return grad_x, grad_weight
    grad_output, hidden, weight = unit_columns(grad_output), unit_columns(hidden), unit_columns(weight)
    grad_hidden = grad_output if grad_hidden is None else unit_columns(grad_hidden)
    tokens_per_chunk, chunks = chunked(samples * tokens, samples * tokens, programs)
    parts = parts_of(grad_weight, chunks)
    block, warps = block_and_warps(width, "backward")
    with torch.cuda.device_of(hidden):
        backward_kernel[(chunks,)](
            grad_hidden, grad_output, hidden, weight, rstd, grad_x, parts,
            *grad_hidden.stride()[:2], *grad_output.stride()[:2], *hidden.stride()[:2],
            samples * tokens, tokens, tokens_per_chunk, width, offset,
            ADDED=added, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        combine(parts, grad_weight, chunks)
    return grad_x, grad_weight
