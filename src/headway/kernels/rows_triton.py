"""What kernels share that hold a row in the registers of one program: blocks, chunks of rows, sums of chunks' parts.

A sum over rows is made in two steps, and nothing is added atomically: each program keeps the sum of a chunk of
consecutive rows, then a kernel adds up the chunks. Their number follows from shapes alone, so that gradients have the
same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""That kernels over rows read and write."""
WIDEST = 8192
"""Elements of a row that fit the registers of one program; bfloat16 without spills (proof/), float32 spills a few."""
BACKWARD_PROGRAMS = 512
"""About four rounds over the 132 multiprocessors of an H100; partial sums are then a few per cent of the traffic."""
ELEMENTS_PER_THREAD = {"forward": 32, "backward": 16}
COMBINED_CHUNKS, COMBINED_COLUMNS = 32, 64


@triton.jit
def combine_kernel(parts, total, chunks, width, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``parts`` [rows, chunks, width] over chunks, always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    summed = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        places = (row * chunks + chunk)[:, None] * width + columns[None, :]
        tile = tl.load(parts + places, mask=(chunk < chunks)[:, None] & inside[None, :], other=0.0)
        summed += tl.sum(tile, 0)
    tl.store(total + row * width + columns, summed.to(total.dtype.element_ty), mask=inside)


def parts_of(total: Tensor, chunks: int) -> Tensor:
    """Where programs leave their parts of ``total``: room for each chunk's, or the total itself where one is all."""
    return total if chunks == 1 else total.new_empty((chunks * total.numel(),), dtype=torch.float32)


def combine(parts: Tensor, total: Tensor, chunks: int) -> None:
    """Sum ``parts_of(total, chunks)`` into ``total`` [..., width]; to be called with the device of both current."""
    if chunks == 1 or not total.numel():
        return
    width = total.shape[-1]
    combine_kernel[(total.numel() // width, triton.cdiv(width, COMBINED_COLUMNS))](
        parts, total, chunks, width, CHUNKS=COMBINED_CHUNKS, COLUMNS=COMBINED_COLUMNS, num_warps=4
    )


def chunked(all_rows: int, rows_of_a_sum: int, programs: int) -> tuple[int, int]:
    """Rows that a program takes, and programs for each sum over ``rows_of_a_sum``, of about ``programs`` in all."""
    rows_per_chunk = min(rows_of_a_sum, triton.cdiv(all_rows, programs))
    return rows_per_chunk, triton.cdiv(rows_of_a_sum, rows_per_chunk)


def block_and_warps(width: int, direction: str) -> tuple[int, int]:
    """Elements of a program's block and the warps that hold it, so that nothing spills."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // (32 * ELEMENTS_PER_THREAD[direction])))


def unit_columns(tensor: Tensor) -> Tensor:
    """``tensor`` with neighbouring columns beside each other in memory, copied only if they are not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
