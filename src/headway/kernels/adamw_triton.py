"""AdamW for GPUs: one launch over the blocks of many tensors, each number read and written once, nothing atomic.

Tensors are found by a table of what they are and their addresses, blocks of them by a table of (tensor, block). Those
whose addresses and sizes allow 16 bytes a thread go in a launch of their own, so that a few odd ones do not slow the
rest down; so do those whose elements are numbered with gaps, as it takes divisions to number them.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.stochastic_rounding import Place

BLOCK, WARPS = 2048, 4
"""Eight elements a thread: 16 bytes of bfloat16."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def random_16(index, key, step):
    """The 16-bit number of each global ``index`` (int64): see ``stochastic_rounding``."""
    block = index >> 3
    low = block.to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, low, high, low * 0 + step, low * 0)
    which = (index >> 1) & 3
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return tl.where((index & 1) == 0, word & 0xFFFF, word >> 16)


@triton.jit
def rounded_stochastically(values, numbers):
    """float32 numbers that bfloat16 has: ``values`` up or down by ``numbers`` (uint32 below 2¹⁶)."""
    pattern = values.to(tl.uint32, bitcast=True)
    rounded = ((pattern + numbers) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((pattern & 0x7F800000) != 0x7F800000, rounded, values)


@triton.jit(do_not_specialize=["step"])
def adamw_kernel(
    work, table, keeps, average_weights, scale, step_size, rest1, beta2, rest2, epsilon, correction, step,
    AVERAGES: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, CONTIGUOUS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor. ``restN`` is 1 − βN; ``work`` is [programs, 2].

    ``table`` is [tensors, 11 + AVERAGES]: elements, the five numbers of the place, key, addresses of weight, gradient,
    moments and averages.
    """
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(work + 2 * program)
    block = tl.load(work + (2 * program + 1))
    row = tensor * (11 + AVERAGES)
    numel = tl.load(table + row)
    weight = tl.load(table + (row + 7)).to(tl.pointer_type(WEIGHT))
    gradient = tl.load(table + (row + 8)).to(tl.pointer_type(GRADIENT))
    exp_avg = tl.load(table + (row + 9)).to(tl.pointer_type(tl.float32))
    exp_avg_sq = tl.load(table + (row + 10)).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
        weight = tl.multiple_of(weight, 16)
        gradient = tl.multiple_of(gradient, 16)
        exp_avg = tl.multiple_of(exp_avg, 16)
        exp_avg_sq = tl.multiple_of(exp_avg_sq, 16)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel

    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    m = tl.load(exp_avg + place, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
    m = m + rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) * tl.load(keeps + tensor)
    w = w - step_size * (m / (tl.sqrt(v) / correction + epsilon))
    if STOCHASTIC:
        index = tl.load(table + (row + 1)) + place
        if not CONTIGUOUS:
            run = tl.load(table + (row + 2))
            rows = tl.load(table + (row + 3))
            line = place // run
            index = tl.load(table + (row + 1)) + place % run
            index += line % rows * tl.load(table + (row + 4)) + line // rows * tl.load(table + (row + 5))
        w = rounded_stochastically(w, random_16(index, tl.load(table + (row + 6)), step))
    rounded = w.to(WEIGHT)
    tl.store(weight + place, rounded, mask=inside)
    for number in tl.static_range(AVERAGES):
        average = tl.load(table + (row + (11 + number))).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            average = tl.multiple_of(average, 16)
        a = tl.load(average + place, mask=inside, other=0.0)
        a = a + tl.load(average_weights + (row * 0 + number)) * (rounded.to(tl.float32) - a)
        tl.store(average + place, a, mask=inside)


def fits(weights: list[Tensor], gradients: list[Tensor], exp_avgs: list[Tensor]) -> bool:
    """Whether this kernel takes such tensors."""
    return all(tensor.dtype in TYPES for tensor in (*weights, *gradients)) and all(
        tensor.dtype == torch.float32 for tensor in exp_avgs
    )


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    averages: list[Tensor],
    scale: Tensor,
    keeps: list[float],
    average_weights: list[float],
    step_size: float,
    betas: tuple[float, float],
    epsilon: float,
    correction: float,
    places: list[Place],
    keys: list[int],
    step: int,
) -> None:
    """As ``adamw_reference.update``."""
    count = len(weights)
    gradients = [gradient.contiguous() for gradient in gradients]
    kinds = [weights, gradients, exp_avgs, exp_avg_sqs]
    kinds += [averages[first : first + count] for first in range(0, len(averages), count)]
    launches: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, weight in enumerate(weights):
        if weight.numel():
            aligned = not weight.numel() % 16 and all(kind[number].data_ptr() % 16 == 0 for kind in kinds)
            contiguous = not places or places[number].contiguous
            launches[gradients[number].dtype, aligned, contiguous].append(number)
    device = weights[0].device
    movements = _on(device, average_weights or [0.0], torch.float32)
    for (gradient_type, aligned, contiguous), chosen in launches.items():
        table = [
            [
                weights[number].numel(),
                *(vars(places[number]).values() if places else [0] * 5),
                keys[number] if keys else 0,
                *(kind[number].data_ptr() for kind in kinds),
            ]
            for number in chosen
        ]
        work = _work(tuple(row[0] for row in table), device)
        with torch.cuda.device_of(weights[0]):
            adamw_kernel[(len(work),)](
                work, _on(device, table, torch.int64), _on(device, [keeps[number] for number in chosen], torch.float32),
                movements, scale, step_size, 1 - betas[0], betas[1], 1 - betas[1], epsilon, correction, step,
                AVERAGES=len(average_weights), WEIGHT=TYPES[weights[0].dtype], GRADIENT=TYPES[gradient_type],
                ALIGNED=aligned, CONTIGUOUS=contiguous, STOCHASTIC=bool(keys), BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip


@lru_cache(maxsize=32)
def _work(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 (programs, 2): the tensor and the block of it that each program has."""
    blocks = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    first = torch.cumsum(blocks, 0) - blocks
    return torch.stack([tensors, torch.arange(len(tensors)) - first[tensors]], 1).to(device)


def _on(device: torch.device, numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A table of numbers for a launch; the copy does not wait for the device."""
    table = torch.tensor(numbers, dtype=dtype)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
