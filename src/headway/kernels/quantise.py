"""Quantisation to float8 as one operator: of a matrix, and in the same pass of its transpose, which backward needs."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from headway.kernels import quantise_reference
from headway.kernels.quantise_reference import FORMATS, SCALINGS, Quantised, scales_shape

Scaling = Literal["tensor", "row", "block_1x128", "block_128x128", "mx"]
NumberFormat = Literal["e4m3", "e5m2"]


def quantise(x: Tensor, scaling: Scaling, number_format: NumberFormat = "e4m3") -> Quantised:
    """Quantise ``x`` [rows, columns], bfloat16, float16 or float32 of any strides: see ``quantise_reference``.

    ``scaling`` says which numbers share a scale: all ("tensor"), a row, a block of 1 × 128 or 128 × 128, or 1 × 32 with
    a power of two ("mx"). Codes lie row by row; the last block of a row or column may be smaller. Raises ValueError.
    """
    _check(x, scaling, number_format)
    codes, scales, _, _ = quantise_matrix(x, 1, scaling, number_format)
    return Quantised(codes, scales)


def quantise_both(x: Tensor, scaling: Scaling, number_format: NumberFormat = "e4m3") -> tuple[Quantised, Quantised]:
    """``quantise`` of ``x`` and of its transpose; ``x`` is read once (twice where scales need all of a row or column).

    A product needs the numbers of its inner side together under a scale, and backward has other inner sides.
    """
    _check(x, scaling, number_format)
    codes, scales, transposed_codes, transposed_scales = quantise_matrix(x, 2, scaling, number_format)
    return Quantised(codes, scales), Quantised(transposed_codes, transposed_scales)


def _check(x: Tensor, scaling: str, number_format: str) -> None:
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"quantise: {x.dtype} {list(x.shape)} is not [rows, columns] of bfloat16, float16 or float32")
    if scaling not in SCALINGS:
        raise ValueError(f"quantise: scaling {scaling!r} is none of {', '.join(SCALINGS)}")
    if number_format not in FORMATS:
        raise ValueError(f"quantise: format {number_format!r} is none of {', '.join(FORMATS)}")


@torch.library.custom_op("headway::quantise", mutates_args=())
def quantise_matrix(x: Tensor, layouts: int, scaling: str, number_format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of x, and of its transpose (empty unless there are two ``layouts``)."""
    return _by_reference(x, layouts, scaling, number_format)


def _by_reference(x: Tensor, layouts: int, scaling: str, number_format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result = quantise_reference.quantise(x, scaling, number_format)
    transposed = quantise_reference.quantise(x.mT, scaling, number_format) if layouts == 2 else _nothing(result)
    return result.codes.contiguous(), result.scales, transposed.codes.contiguous(), transposed.scales


def _nothing(like: Quantised) -> Quantised:
    return Quantised(like.codes.new_empty(0), like.scales.new_empty(0))


@quantise_matrix.register_kernel("cuda")
def _(x, layouts, scaling, number_format):
    from headway.kernels import quantise_triton

    if quantise_triton.fits(x):
        return quantise_triton.quantise_matrix(x, layouts, scaling, number_format)
    return _by_reference(x, layouts, scaling, number_format)


@quantise_matrix.register_fake
def _(x, layouts, scaling, number_format):
    rows, columns = x.shape
    kind = torch.float8_e8m0fnu if scaling == "mx" else torch.float32
    codes = x.new_empty((rows, columns), dtype=FORMATS[number_format])
    scales = x.new_empty(scales_shape(scaling, rows, columns), dtype=kind)
    if layouts == 1:
        return codes, scales, codes.new_empty(0), scales.new_empty(0)
    transposed = x.new_empty((columns, rows), dtype=FORMATS[number_format])
    return codes, scales, transposed, x.new_empty(scales_shape(scaling, columns, rows), dtype=kind)


@register_sharding(torch.ops.headway.quantise.default)
def _(x, layouts, scaling, number_format):
    """Where scales are of single rows, rows split; both layouts need rows and columns together.

    The number comes first because DTensor tells calls apart by what follows the first integer among the arguments.
    """
    ways: list[Any] = [([Replicate()] * 4, [Replicate(), None, None, None])]
    if layouts == 1 and scaling in ("row", "block_1x128", "mx"):
        ways.append(([Shard(0), Shard(0), Replicate(), Replicate()], [Shard(0), None, None, None]))
    return ways
