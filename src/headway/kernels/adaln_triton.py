"""adaLN for GPUs: one pass forward; backward in one pass and a sum of partial sums in a fixed order.

A token is a program's row, held in registers. Backward gives each program a run of consecutive tokens that read the
same row of the parameters, and keeps that run's sums.
"""

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
    x, branch, gate, scale, shift, hidden, output, mean_out, rstd_out,
    x_sample, x_token, branch_sample, branch_token, gate_sample, gate_row,
    scale_sample, scale_row, shift_sample, shift_row, tokens, tokens_per_row, width, epsilon,
    ADDED: tl.constexpr, GATED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: h, o and the token's statistics. ``…_sample`` and the like are strides in elements."""
    program = tl.program_id(0).to(tl.int64)
    sample = program // tokens
    token = program % tokens
    row = token // tokens_per_row
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + sample * x_sample + token * x_token + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        added = tl.load(branch + sample * branch_sample + token * branch_token + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        if GATED:
            gates = tl.load(gate + sample * gate_sample + row * gate_row + columns, mask=inside, other=0.0)
            added = gates.to(tl.float32) * added
        rounded = (values + added).to(hidden.dtype.element_ty)
        tl.store(hidden + program * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = 0.0
    if CENTRED:
        mean = tl.sum(values, 0) / width
        values = tl.where(inside, values - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    scales = tl.load(scale + sample * scale_sample + row * scale_row + columns, mask=inside, other=0.0).to(tl.float32)
    shifts = tl.load(shift + sample * shift_sample + row * shift_row + columns, mask=inside, other=0.0).to(tl.float32)
    result = values * rstd * (1.0 + scales) + shifts
    tl.store(output + program * width + columns, result.to(output.dtype.element_ty), mask=inside)
    tl.store(mean_out + program, mean)
    tl.store(rstd_out + program, rstd)


@triton.jit
def backward_kernel(
    grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd,
    grad_x, grad_branch, grad_gate, grad_scale, grad_shift,
    grad_hidden_sample, grad_hidden_token, grad_output_sample, grad_output_token, hidden_sample, hidden_token,
    branch_sample, branch_token, gate_sample, gate_row, scale_sample, scale_row,
    tokens, rows, tokens_per_row, chunks, tokens_per_chunk, width,
    ADDED: tl.constexpr, GATED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk of the tokens that read one row of the parameters: their gradients, and their part of the row's."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program % chunks
    row = program // chunks % rows
    sample = program // chunks // rows
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if GATED:
        gate_sum = tl.zeros((BLOCK,), tl.float32)
    scale_sum = tl.zeros((BLOCK,), tl.float32)
    shift_sum = tl.zeros((BLOCK,), tl.float32)
    first = row * tokens_per_row + chunk * tokens_per_chunk
    last = tl.minimum(first + tokens_per_chunk, (row + 1) * tokens_per_row)
    for token in range(first, last):
        place = sample * tokens + token
        upstream = tl.load(
            grad_output + sample * grad_output_sample + token * grad_output_token + columns, mask=inside, other=0.0
        ).to(tl.float32)
        normed = tl.load(hidden + sample * hidden_sample + token * hidden_token + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        deviation = tl.load(rstd + place)
        if CENTRED:
            normed -= tl.load(mean + place)
        normed = normed * deviation
        scale_sum += upstream * normed
        shift_sum += upstream
        # Read again for each token, from a cache: held in registers they would make the sums spill.
        scales = tl.load(scale + sample * scale_sample + row * scale_row + columns, mask=inside, other=0.0)
        grad = upstream * (1.0 + scales.to(tl.float32))
        projected = normed * (tl.sum(grad * normed, 0) / width)
        if CENTRED:
            projected += tl.sum(grad, 0) / width
        grad = deviation * (grad - projected)
        if ADDED:
            grad += tl.load(
                grad_hidden + sample * grad_hidden_sample + token * grad_hidden_token + columns, mask=inside, other=0.0
            ).to(tl.float32)
        # Before the branch is loaded, which the compiler must not do any earlier: registers are short here.
        tl.store(grad_x + place * width + columns, grad.to(grad_x.dtype.element_ty), mask=inside)
        if GATED:
            added = tl.load(branch + sample * branch_sample + token * branch_token + columns, mask=inside, other=0.0)
            gate_sum += grad * added.to(tl.float32)
            gates = tl.load(gate + sample * gate_sample + row * gate_row + columns, mask=inside, other=0.0)
            gated = grad * gates.to(tl.float32)
            tl.store(grad_branch + place * width + columns, gated.to(grad_branch.dtype.element_ty), mask=inside)
    part = program * width + columns
    tl.store(grad_scale + part, scale_sum.to(grad_scale.dtype.element_ty), mask=inside)
    tl.store(grad_shift + part, shift_sum.to(grad_shift.dtype.element_ty), mask=inside)
    if GATED:
        tl.store(grad_gate + part, gate_sum.to(grad_gate.dtype.element_ty), mask=inside)


def fits(x: Tensor) -> bool:
    """Whether these kernels take tokens like ``x`` [samples, tokens, width]."""
    return x.dtype in TYPES and 0 < x.shape[2] <= WIDEST


def forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, norm: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``adaln_reference.forward``."""
    samples, tokens, width = x.shape
    added, gated = branch is not None, gate is not None
    hidden = x.new_empty(x.shape if added else 0)
    output = x.new_empty(x.shape)
    mean = x.new_empty((samples, tokens), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if not x.numel():
        return hidden, output, mean, rstd
    x, scale, shift = unit_columns(x), unit_columns(scale), unit_columns(shift)
    branch = x if branch is None else unit_columns(branch)
    gate = scale if gate is None else unit_columns(gate)
    block, warps = block_and_warps(width, "forward")
    with torch.cuda.device_of(x):
        forward_kernel[(samples * tokens,)](
            x, branch, gate, scale, shift, hidden, output, mean, rstd,
            *x.stride()[:2], *branch.stride()[:2], *gate.stride()[:2], *scale.stride()[:2], *shift.stride()[:2],
            tokens, tokens // scale.shape[1], width, epsilon,
            ADDED=added, GATED=gated, CENTRED=norm == "layer", BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return hidden, output, mean, rstd


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
    programs: int = BACKWARD_PROGRAMS,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``adaln_reference.backward``, on about ``programs`` programs."""
    samples, tokens, width = hidden.shape
    rows = scale.shape[1]
    added, gated = grad_hidden is not None, gate is not None
    grad_x = hidden.new_empty(hidden.shape)
    grad_branch = hidden.new_empty(hidden.shape if gated else 0)
    parameter = (samples, rows, width)
    grad_gate, grad_scale, grad_shift = (
        scale.new_zeros(0) if gate is None else gate.new_zeros(parameter),
        scale.new_zeros(parameter),
        scale.new_zeros(parameter),
    )
    if not hidden.numel():
        return grad_x, grad_branch, grad_gate, grad_scale, grad_shift
    grad_output, hidden, scale = unit_columns(grad_output), unit_columns(hidden), unit_columns(scale)
    grad_hidden = grad_output if grad_hidden is None else unit_columns(grad_hidden)
    branch = hidden if branch is None else unit_columns(branch)
    gate = scale if gate is None else unit_columns(gate)
    tokens_per_row = tokens // rows
    tokens_per_chunk, chunks = chunked(samples * tokens, tokens_per_row, programs)
    totals = (grad_gate, grad_scale, grad_shift)
    parts = [parts_of(total, chunks) for total in totals]
    block, warps = block_and_warps(width, "backward")
    with torch.cuda.device_of(hidden):
        backward_kernel[(samples * rows * chunks,)](
            grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd, grad_x, grad_branch, *parts,
            *grad_hidden.stride()[:2], *grad_output.stride()[:2], *hidden.stride()[:2], *branch.stride()[:2],
            *gate.stride()[:2], *scale.stride()[:2],
            tokens, rows, tokens_per_row, chunks, tokens_per_chunk, width,
            ADDED=added, GATED=gated, CENTRED=norm == "layer", BLOCK=block, num_warps=warps,
        )  # fmt: skip
        for part, total in zip(parts, totals, strict=True):
            combine(part, total, chunks)
    return grad_x, grad_branch, grad_gate, grad_scale, grad_shift
