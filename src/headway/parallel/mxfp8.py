"""Linear layers whose three products are of MXFP8 numbers: e4m3 codes, 32 of them to a scale that is a power of two.

Each product quantises its operands along its own inner side, so that weights, inputs and gradients are quantised in two
layouts (Mishra et al. 2025, arXiv 2506.08027: e4m3 also for gradients, scales rounded up). What backward needs is kept
as it came and quantised again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.kernels import Quantised, quantise, quantise_both

BLOCK = 32
ON_TENSOR_CORES = (10, 0)
"""Compute capability of the first GPUs that multiply MXFP8: Blackwell."""


class MXFP8Linear(nn.Linear):
    """torch.nn.Linear with another forward: a model's layers become it by their class, and keep names and weights."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, in_features] -> […, out_features] in the dtype of the input."""
        output: Tensor = _Products.apply(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = quantise(x.flatten(0, -2), "mx")
        return product(rows, quantise(weight, "mx"), x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        along_outputs, along_tokens = quantise_both(grad.flatten(0, -2), "mx")
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(along_outputs, quantise(weight.mT, "mx"), x.dtype).unflatten(0, x.shape[:-1])
        if ctx.needs_input_grad[1]:
            grad_weight = product(along_tokens, quantise(x.flatten(0, -2).mT, "mx"), weight.dtype)
        return grad_x, grad_weight


def product(left: Quantised, right: Quantised, dtype: torch.dtype) -> Tensor:
    """left [M, inner] times the transpose of right [N, inner]: [M, N] in ``dtype``, added up in float32.

    On GPUs without such tensor cores and on CPUs the numbers that the codes stand for are multiplied in float32.
    """
    device = left.codes.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= ON_TENSOR_CORES:
        return _on_tensor_cores(left, right, dtype)
    return (left.dequantised("mx") @ right.dequantised("mx").mT).to(dtype)


def _on_tensor_cores(left: Quantised, right: Quantised, dtype: torch.dtype) -> Tensor:
    codes = [_padded(operand.codes) for operand in (left, right)]
    scales = [swizzled(operand.scales) for operand in (left, right)]
    return F.scaled_mm(
        codes[0],
        codes[1].t(),
        scales[0],
        F.ScalingType.BlockWise1x32,
        scales[1],
        F.ScalingType.BlockWise1x32,
        F.SwizzleType.SWIZZLE_32_4_4,
        F.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16 if dtype == torch.float32 else dtype,
    ).to(dtype)


def _padded(codes: Tensor) -> Tensor:
    """Zeros after the last codes of each row, up to a whole block."""
    missing = -codes.shape[1] % BLOCK
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


def swizzled(scales: Tensor) -> Tensor:
    """Scales [rows, blocks] in the order in which tensor cores read them, flat.

    Tiles of 128 rows and 4 blocks lie row by row; in a tile row r of 32 has 16 numbers, those of rows r, r + 32, r + 64
    and r + 96 (cuBLAS documentation, 1D block scaling factors layout).
    """
    rows, blocks = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)
