"""Gated linear units for GPUs: one pass forward, one backward, which computes the activation again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.rows_triton import TYPES, unit_columns

BLOCK, ELEMENTS_PER_THREAD = 2048, 16

ROOT_2 = tl.constexpr(2**0.5)
ROOT_2_PI = tl.constexpr(2.5066282746310002)
TWICE_ROOT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def share_of(gate, ACTIVATION: tl.constexpr):
    """What of the gate passes: a(gate) = gate · share."""
    if ACTIVATION == "silu":
        return tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(gate / ROOT_2))
    else:
        return tl.sigmoid((gate + gate * gate * gate * CUBIC) * TWICE_ROOT_2_OVER_PI)


@triton.jit
def slope_of(gate, share, ACTIVATION: tl.constexpr):
    """a'(gate)."""
    if ACTIVATION == "silu":
        return share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == "gelu":
        return share + gate * tl.exp(-0.5 * gate * gate) / ROOT_2_PI
    else:
        inner = (1.0 + gate * gate * 3.0 * CUBIC) * TWICE_ROOT_2_OVER_PI
        return share + gate * share * (1.0 - share) * inner


@triton.jit
def forward_kernel(
    gate, value, output, gate_row, value_row, blocks, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of columns of a row. ``…_row`` are strides in elements."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + row * value_row + columns, mask=inside, other=0.0).to(tl.float32)
    result = gates * share_of(gates, ACTIVATION) * values
    tl.store(output + row * width + columns, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad, gate, value, grad_gate, grad_value, grad_row, gate_row, value_row, grad_gate_row, grad_value_row,
    blocks, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As forward."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    upstream = tl.load(grad + row * grad_row + columns, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + row * value_row + columns, mask=inside, other=0.0).to(tl.float32)
    share = share_of(gates, ACTIVATION)
    for_gate = upstream * values * slope_of(gates, share, ACTIVATION)
    tl.store(grad_gate + row * grad_gate_row + columns, for_gate.to(grad_gate.dtype.element_ty), mask=inside)
    for_value = upstream * gates * share
    tl.store(grad_value + row * grad_value_row + columns, for_value.to(grad_value.dtype.element_ty), mask=inside)


def fits(gate: Tensor) -> bool:
    """Whether these kernels take such tensors."""
    return gate.dtype in TYPES and gate.ndim > 0


def forward(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """As ``glu_reference.forward``."""
    output = gate.new_empty(gate.shape)
    if not gate.numel():
        return output
    gates, values = _rows(gate), _rows(value)
    rows, width = gates.shape
    block, blocks, warps = _launch(width)
    with torch.cuda.device_of(gate):
        forward_kernel[(rows * blocks,)](
            gates, values, output, gates.stride(0), values.stride(0), blocks, width,
            ACTIVATION=activation, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return output


def backward(grad: Tensor, gate: Tensor, value: Tensor, activation: str, grad_gate: Tensor, grad_value: Tensor) -> None:
    """As ``glu_reference.backward``; the gradients are rows of one stride."""
    if not gate.numel():
        return
    read = [_rows(tensor) for tensor in (grad, gate, value)]
    written = [tensor.view(-1, tensor.shape[-1]) for tensor in (grad_gate, grad_value)]
    rows, width = read[0].shape
    block, blocks, warps = _launch(width)
    with torch.cuda.device_of(gate):
        backward_kernel[(rows * blocks,)](
            *read, *written, *(tensor.stride(0) for tensor in (*read, *written)), blocks, width,
            ACTIVATION=activation, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _rows(tensor: Tensor) -> Tensor:
    """[rows, width], copied only if rows have no one stride, or columns do not lie beside each other."""
    return unit_columns(tensor.reshape(-1, tensor.shape[-1]))


def _launch(width: int) -> tuple[int, int, int]:
    """Columns of a program, programs a row, warps."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block), max(1, block // (32 * ELEMENTS_PER_THREAD))
