"""Norm and rotation of heads for GPUs: a token's heads in one program, each stream written to its place in the result.

Backward norms again what it reads, so nothing is kept of forward but its inputs; the weights' gradients are made in a
pass and a sum of partial sums in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.rows_triton import BACKWARD_PROGRAMS, TYPES, WIDEST, chunked, combine, parts_of, unit_columns

HEADS_BLOCK = 4096
"""Elements of the heads of a token that one program holds, if no norm goes across them."""
ELEMENTS_PER_THREAD = 32
ELEMENTS_PER_THREAD_ACROSS = {"forward": 32, "backward": 16}


@triton.jit
def places_of(pair, width, rotated, PARTIAL: tl.constexpr):
    """Channels of both members of a pair that lie apart; pairs that are not rotated are of the channels left over."""
    half = (width // 2).to(tl.int64)
    if PARTIAL:
        first = tl.where(pair < rotated, pair, pair + rotated)
        second = tl.where(pair < rotated, pair + rotated, pair + half)
    else:
        first = pair
        second = pair + half
    return first, second


@triton.jit
def load_pairs(
    start, heads, head_stride, inside, width, rotated,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """float32 [HEADS, PAIRS] of first and of second members, from ``start`` on; ``inside``: which heads there are."""
    rows = start + heads[:, None] * head_stride
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        tile = tl.load(rows + column[None, :], mask=inside[:, None] & (column < width)[None, :], other=0.0)
        first, second = tl.split(tl.reshape(tile.to(tl.float32), (HEADS, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)
        mask = inside[:, None] & (pair < width // 2)[None, :]
        place, other_place = places_of(pair, width, rotated, PARTIAL)
        first = tl.load(rows + place[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows + other_place[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    start, first, second, heads, head_stride, inside, width, rotated,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The same backwards."""
    rows = start + heads[:, None] * head_stride
    kind = start.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        tile = tl.reshape(tl.join(first, second), (HEADS, 2 * PAIRS)).to(kind)
        tl.store(rows + column[None, :], tile, mask=inside[:, None] & (column < width)[None, :])
    else:
        pair = tl.arange(0, PAIRS)
        mask = inside[:, None] & (pair < width // 2)[None, :]
        place, other_place = places_of(pair, width, rotated, PARTIAL)
        tl.store(rows + place[None, :], first.to(kind), mask=mask)
        tl.store(rows + other_place[None, :], second.to(kind), mask=mask)


@triton.jit
def load_angles(table, place, rotated, neutral, PAIRS: tl.constexpr):
    """[1, PAIRS] cosines or sines; ``neutral`` for pairs that are not rotated."""
    pair = tl.arange(0, PAIRS)
    return tl.load(table + place + pair, mask=pair < rotated, other=neutral).to(tl.float32)[None, :]


@triton.jit
def deviation_of(first, second, heads, width, epsilon, ACROSS: tl.constexpr):
    """1/rms of each head [HEADS, 1], or of all."""
    squares = tl.sum(first * first + second * second, 1)
    if ACROSS:
        return tl.rsqrt(tl.sum(squares, 0) / (heads * width) + epsilon)
    else:
        return tl.rsqrt(squares / width + epsilon)[:, None]


@triton.jit
def forward_kernel(
    x, weight, cos, sin, output, x_sample, x_token, x_head, cos_sample, cos_token, sin_sample, sin_token,
    tokens, all_tokens, before, heads, head_blocks, width, rotated, epsilon,
    NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    ACROSS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token, of a stream that is ``before`` tokens behind the first of the result."""
    program = tl.program_id(0).to(tl.int64)
    token = program // head_blocks % tokens
    sample = program // head_blocks // tokens
    head = program % head_blocks * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    first, second = load_pairs(
        x + sample * x_sample + token * x_token, head, x_head, inside, width, rotated,
        INTERLEAVED, PARTIAL, HEADS, PAIRS,
    )  # fmt: skip
    if NORMED:
        deviation = deviation_of(first, second, heads, width, epsilon, ACROSS)
        if ACROSS:
            w1, w2 = load_pairs(weight, head, width, inside, width, rotated, INTERLEAVED, PARTIAL, HEADS, PAIRS)
        else:
            only = tl.arange(0, 1).to(tl.int64)
            w1, w2 = load_pairs(weight, only, width, only == 0, width, rotated, INTERLEAVED, PARTIAL, 1, PAIRS)
        first = first * deviation * w1
        second = second * deviation * w2
    place = before + token
    if ROTATED:
        c = load_angles(cos, sample * cos_sample + place * cos_token, rotated, 1.0, PAIRS)
        s = load_angles(sin, sample * sin_sample + place * sin_token, rotated, 0.0, PAIRS)
        turned = first * c - second * s
        second = first * s + second * c
        first = turned
    store_pairs(
        output + (sample * all_tokens + place) * heads * width, first, second, head, width, inside, width, rotated,
        INTERLEAVED, PARTIAL, HEADS, PAIRS,
    )  # fmt: skip


@triton.jit
def backward_kernel(
    grad, x, weight, cos, sin, grad_x, grad_weight,
    grad_sample, grad_token, grad_head, x_sample, x_token, x_head, cos_sample, cos_token, sin_sample, sin_token,
    samples_tokens, tokens, tokens_per_chunk, before, heads, head_blocks, width, rotated, epsilon,
    NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    ACROSS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A block of heads of a chunk of tokens: their gradients, and their part of the weight's."""
    program = tl.program_id(0).to(tl.int64)
    head = program % head_blocks * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    only = tl.arange(0, 1).to(tl.int64)
    if NORMED:
        first_sum = tl.zeros((HEADS, PAIRS), tl.float32)
        second_sum = tl.zeros((HEADS, PAIRS), tl.float32)
    begin = program // head_blocks * tokens_per_chunk
    end = tl.minimum(begin + tokens_per_chunk, samples_tokens)
    for number in range(begin, end):
        sample = number // tokens
        token = number % tokens
        place = before + token
        first, second = load_pairs(
            grad + sample * grad_sample + place * grad_token, head, grad_head, inside, width, rotated,
            INTERLEAVED, PARTIAL, HEADS, PAIRS,
        )  # fmt: skip
        if ROTATED:
            c = load_angles(cos, sample * cos_sample + place * cos_token, rotated, 1.0, PAIRS)
            s = load_angles(sin, sample * sin_sample + place * sin_token, rotated, 0.0, PAIRS)
            turned = first * c + second * s
            second = second * c - first * s
            first = turned
        if NORMED:
            n1, n2 = load_pairs(
                x + sample * x_sample + token * x_token, head, x_head, inside, width, rotated,
                INTERLEAVED, PARTIAL, HEADS, PAIRS,
            )  # fmt: skip
            deviation = deviation_of(n1, n2, heads, width, epsilon, ACROSS)
            n1 = n1 * deviation
            n2 = n2 * deviation
            first_sum += first * n1
            second_sum += second * n2
            # Read again for each token, from a cache: held in registers they would make the sums spill.
            if ACROSS:
                w1, w2 = load_pairs(weight, head, width, inside, width, rotated, INTERLEAVED, PARTIAL, HEADS, PAIRS)
            else:
                w1, w2 = load_pairs(weight, only, width, only == 0, width, rotated, INTERLEAVED, PARTIAL, 1, PAIRS)
            first = first * w1
            second = second * w2
            products = tl.sum(first * n1 + second * n2, 1)
            mean = tl.sum(products, 0) / (heads * width) if ACROSS else (products / width)[:, None]
            first = deviation * (first - n1 * mean)
            second = deviation * (second - n2 * mean)
        store_pairs(
            grad_x + number * heads * width, first, second, head, width, inside, width, rotated,
            INTERLEAVED, PARTIAL, HEADS, PAIRS,
        )  # fmt: skip
    if NORMED:
        if ACROSS:
            store_pairs(
                grad_weight + program * heads * width, first_sum, second_sum, head, width, inside, width, rotated,
                INTERLEAVED, PARTIAL, HEADS, PAIRS,
            )  # fmt: skip
        else:
            store_pairs(
                grad_weight + program * width, tl.sum(first_sum, 0)[None, :], tl.sum(second_sum, 0)[None, :],
                only, width, only == 0, width, rotated, INTERLEAVED, PARTIAL, 1, PAIRS,
            )  # fmt: skip


def fits(first: Tensor, across: bool) -> bool:
    """Whether these kernels take heads like ``first`` [samples, tokens, heads, channels]."""
    heads, width = first.shape[2:]
    held = (triton.next_power_of_2(heads) if across else 1) * triton.next_power_of_2(width)
    return first.dtype in TYPES and width > 0 and heads > 0 and held <= WIDEST


def forward(
    first: Tensor,
    second: Tensor | None,
    first_weight: Tensor | None,
    second_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    across: bool,
    epsilon: float,
) -> Tensor:
    """As ``norm_rope_reference.forward``."""
    samples, tokens, heads, width = first.shape
    all_tokens = tokens + (0 if second is None else second.shape[1])
    output = first.new_empty((samples, all_tokens, heads, width))
    before = 0
    for x, weight in ((first, first_weight), (second, second_weight)):
        if x is None or not x.numel():
            continue
        x = unit_columns(x)
        tables, strides, rotated = _angles(cos, sin, x)
        shape, blocks, warps = blocks_and_warps(heads, width, across and weight is not None, "forward")
        with torch.cuda.device_of(x):
            forward_kernel[(x.shape[0] * x.shape[1] * blocks,)](
                x, x if weight is None else unit_columns(weight), *tables, output, *x.stride()[:3], *strides,
                x.shape[1], all_tokens, before, heads, blocks, width, rotated, epsilon,
                NORMED=weight is not None, ROTATED=cos is not None, INTERLEAVED=interleaved,
                PARTIAL=cos is not None and 2 * rotated != width, ACROSS=across, **shape, num_warps=warps,
            )  # fmt: skip
        before += x.shape[1]
    return output


def backward(
    grad: Tensor,
    first: Tensor,
    second: Tensor | None,
    first_weight: Tensor | None,
    second_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    across: bool,
    epsilon: float,
    programs: int = BACKWARD_PROGRAMS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``norm_rope_reference.backward``, each stream on about ``programs`` programs."""
    heads, width = first.shape[2:]
    grad = unit_columns(grad)
    results = [first.new_empty(0) for _ in range(4)]
    before = 0
    for number, (x, weight) in enumerate(((first, first_weight), (second, second_weight))):
        if x is None:
            continue
        results[number] = grad_x = x.new_empty(x.shape)
        total = x.new_empty(0) if weight is None else weight.new_zeros(weight.shape)
        results[2 + number] = total
        if not x.numel():
            continue
        x = unit_columns(x)
        tables, strides, rotated = _angles(cos, sin, x)
        shape, blocks, warps = blocks_and_warps(heads, width, across and weight is not None, "backward")
        every = x.shape[0] * x.shape[1]
        tokens_per_chunk, chunks = chunked(every * blocks, every, programs)
        parts = parts_of(total, chunks * blocks)
        with torch.cuda.device_of(x):
            backward_kernel[(chunks * blocks,)](
                grad, x, x if weight is None else unit_columns(weight), *tables, grad_x, parts,
                *grad.stride()[:3], *x.stride()[:3], *strides,
                every, x.shape[1], tokens_per_chunk, before, heads, blocks, width, rotated, epsilon,
                NORMED=weight is not None, ROTATED=cos is not None, INTERLEAVED=interleaved,
                PARTIAL=cos is not None and 2 * rotated != width, ACROSS=across, **shape, num_warps=warps,
            )  # fmt: skip
            combine(parts, total, chunks * blocks)
        before += x.shape[1]
    return results[0], results[1], results[2], results[3]


def _angles(cos: Tensor | None, sin: Tensor | None, x: Tensor) -> tuple[list[Tensor], list[int], int]:
    """Tables, or any pointers where nothing is rotated; their strides over samples and tokens; pairs rotated."""
    if cos is None or sin is None:
        return [x, x], [0, 0, 0, 0], x.shape[3] // 2
    tables = [unit_columns(cos), unit_columns(sin)]
    strides = [stride for table in tables for stride in (table.stride(0) if table.shape[0] > 1 else 0, table.stride(1))]
    return tables, strides, cos.shape[-1]


def blocks_and_warps(heads: int, width: int, across: bool, direction: str) -> tuple[dict[str, int], int, int]:
    """The tile of a program, programs for the heads of a token, and the warps that hold one without spills."""
    pairs = max(1, triton.next_power_of_2(width) // 2)
    held = triton.next_power_of_2(heads)
    elements = ELEMENTS_PER_THREAD_ACROSS[direction] if across else ELEMENTS_PER_THREAD
    if not across:
        held = min(held, max(1, HEADS_BLOCK // (2 * pairs)))
    warps = min(16, max(1, held * 2 * pairs // (32 * elements)))
    return {"HEADS": held, "PAIRS": pairs}, triton.cdiv(heads, held), warps
