"""Quantisation for GPUs: a tile of the matrix is read, scaled and written as codes in both layouts.

Scales of blocks are found within a tile, in one pass. Scales of rows, columns or the whole need a pass of their own for
the largest numbers, which leaves one for each tile and row (column); their maximum is the same in any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.quantise_reference import BLOCKS, FORMATS, SMALLEST, scales_of, scales_shape

TILE, WARPS = 128, 8
"""Side of a tile: the largest block's. 64 numbers a thread."""
TYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


@triton.jit
def tile_of(x, row_stride, column_stride, rows, columns, TILE: tl.constexpr):
    """A program's tile of x in float32, 0 outside, its places and which of them are inside."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(x + places, mask=inside, other=0.0).to(tl.float32), row, column, inside


@triton.jit
def sizes_of(values):
    """Absolute values, infinity for what is NaN, which a maximum would pass over."""
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def scale_of(sizes, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POWER: tl.constexpr):
    """Scales by the largest numbers under them: see ``quantise_reference``."""
    scale = tl.div_rn(sizes, tl.zeros_like(sizes) + LARGEST)
    scale = tl.where(sizes == 0.0, 1.0, tl.where(scale < SMALLEST, SMALLEST, scale))
    if POWER:
        pattern = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = pattern.to(tl.float32, bitcast=True)
    return tl.where(sizes < float("inf"), scale, float("nan"))


@triton.jit
def coded(values, scales, LARGEST: tl.constexpr, FORMAT: tl.constexpr):
    """Codes of ``values``. Saturated by selection: see triton-lang/triton#11111 for what minimum and maximum may do."""
    scaled = values * tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    return scaled.to(FORMAT)


@triton.jit
def maxima_kernel(
    x, row_maxima, column_maxima, row_stride, column_stride, rows, columns, BOTH: tl.constexpr, TILE: tl.constexpr
):
    """Largest |x| of each row of a tile, and of each column: [tiles across, rows] and [tiles down, columns]."""
    values, row, column, _ = tile_of(x, row_stride, column_stride, rows, columns, TILE)
    sizes = sizes_of(values)
    tl.store(row_maxima + tl.program_id(1).to(tl.int64) * rows + row, tl.max(sizes, 1), mask=row < rows)
    if BOTH:
        place = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(column_maxima + place, tl.max(sizes, 0), mask=column < columns)


@triton.jit
def scaled_kernel(
    x, row_scales, column_scales, codes, transposed, row_stride, column_stride, rows, columns,
    LARGEST: tl.constexpr, FORMAT: tl.constexpr, ONE: tl.constexpr, BOTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes of a tile under known scales: of its rows, and transposed of its columns; ``ONE`` scale for all of x."""
    values, row, column, inside = tile_of(x, row_stride, column_stride, rows, columns, TILE)
    by_row = tl.load(row_scales + (row * 0 if ONE else row), mask=row < rows, other=1.0)
    places = row[:, None] * columns + column[None, :]
    tl.store(codes + places, coded(values, by_row[:, None], LARGEST, FORMAT), mask=inside)
    if BOTH:
        by_column = tl.load(column_scales + (column * 0 if ONE else column), mask=column < columns, other=1.0)
        result = tl.trans(coded(values, by_column[None, :], LARGEST, FORMAT))
        there = column[:, None] * rows + row[None, :]
        tl.store(transposed + there, result, mask=tl.trans(inside))


@triton.jit
def block_kernel(
    x, codes, scales, transposed, transposed_scales, row_stride, column_stride, rows, columns,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FORMAT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    POWER: tl.constexpr, BOTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a tile in blocks of ``DOWN`` × ``ACROSS``, of x and of its transpose."""
    values, row, column, inside = tile_of(x, row_stride, column_stride, rows, columns, TILE)
    places = row[:, None] * columns + column[None, :]
    block_codes(values, codes, scales, places, inside, 0, 1, rows, columns,
                LARGEST, SMALLEST, FORMAT, DOWN, ACROSS, POWER, TILE)  # fmt: skip
    if BOTH:
        there = column[:, None] * rows + row[None, :]
        block_codes(tl.trans(values), transposed, transposed_scales, there, tl.trans(inside), 1, 0, columns, rows,
                    LARGEST, SMALLEST, FORMAT, DOWN, ACROSS, POWER, TILE)  # fmt: skip


@triton.jit
def block_codes(
    values, codes, scales, places, inside, DOWN_AXIS: tl.constexpr, ACROSS_AXIS: tl.constexpr, rows, columns,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FORMAT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    POWER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the codes of a tile at ``places``, and its scales [rows / DOWN, columns / ACROSS]."""
    blocks = tl.reshape(values, (TILE // DOWN, DOWN, TILE // ACROSS, ACROSS))
    scale = scale_of(tl.max(tl.max(sizes_of(blocks), 3), 1), LARGEST, SMALLEST, POWER)
    result = coded(blocks, scale[:, None, :, None], LARGEST, FORMAT)
    tl.store(codes + places, tl.reshape(result, (TILE, TILE)), mask=inside)
    down = tl.program_id(DOWN_AXIS).to(tl.int64) * (TILE // DOWN) + tl.arange(0, TILE // DOWN)
    across = tl.program_id(ACROSS_AXIS).to(tl.int64) * (TILE // ACROSS) + tl.arange(0, TILE // ACROSS)
    widest = (columns + ACROSS - 1) // ACROSS
    some = (down * DOWN < rows)[:, None] & (across < widest)[None, :]
    # Of a power of two the exponent alone, 255 for NaN: float8_e8m0fnu.
    kept = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8) if POWER else scale
    tl.store(scales + down[:, None] * widest + across[None, :], kept, mask=some)


def fits(x: Tensor) -> bool:
    """Whether the device of ``x`` converts to float8."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(x.device) >= (8, 9)


def quantise_matrix(x: Tensor, layouts: int, scaling: str, number_format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``quantise.quantise_matrix``."""
    rows, columns = x.shape
    both = layouts == 2
    kind = torch.uint8 if scaling == "mx" else torch.float32
    codes = x.new_empty((rows, columns), dtype=FORMATS[number_format])
    transposed = x.new_empty((columns, rows) if both else 0, dtype=codes.dtype)
    largest = torch.finfo(codes.dtype).max
    constants = {"LARGEST": largest, "FORMAT": TYPES[number_format], "BOTH": both, "TILE": TILE, "num_warps": WARPS}
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    with torch.cuda.device_of(x):
        if scaling in BLOCKS:
            down, across = BLOCKS[scaling]
            scales = x.new_ones(scales_shape(scaling, rows, columns), dtype=kind)
            transposed_scales = x.new_ones(scales_shape(scaling, columns, rows) if both else 0, dtype=kind)
            if x.numel():
                block_kernel[grid](
                    x, codes, scales, transposed, transposed_scales, *x.stride(), rows, columns,
                    SMALLEST=SMALLEST, DOWN=down, ACROSS=across, POWER=scaling == "mx", **constants,
                )  # fmt: skip
        else:
            scales, transposed_scales = _scales_of_lines(x, scaling, largest, both, grid)
            if x.numel():
                scaled_kernel[grid](
                    x, scales, transposed_scales, codes, transposed, *x.stride(), rows, columns,
                    ONE=scaling == "tensor", **constants,
                )  # fmt: skip
    if scaling == "mx":
        scales, transposed_scales = (each.view(torch.float8_e8m0fnu) for each in (scales, transposed_scales))
    return codes, scales, transposed, transposed_scales


def _scales_of_lines(
    x: Tensor, scaling: str, largest: float, both: bool, grid: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Scales of rows and of columns, or of the whole."""
    rows, columns = x.shape
    each = both and scaling == "row"
    row_maxima = x.new_zeros((grid[1], rows), dtype=torch.float32)
    column_maxima = x.new_zeros((grid[0], columns) if each else (1, 0), dtype=torch.float32)
    if x.numel():
        maxima_kernel[grid](
            x, row_maxima, column_maxima, *x.stride(), rows, columns, BOTH=each, TILE=TILE, num_warps=WARPS
        )
    if scaling == "tensor":
        whole = scales_of(row_maxima.amax() if x.numel() else row_maxima.new_zeros(()), largest)
        return whole, whole.clone() if both else whole.new_empty(0)
    down = scales_of(row_maxima.amax(0) if columns else row_maxima.new_zeros(rows), largest)
    across = scales_of(column_maxima.amax(0) if rows else column_maxima.new_zeros(column_maxima.shape[1]), largest)
    return down[:, None], across[:, None] if both else across
