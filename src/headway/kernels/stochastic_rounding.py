"""Stochastic rounding to bfloat16: every random bit is a function of (seed, stream, parameter, element, step).

A number between two bfloat16 neighbours becomes the upper one with the probability of its place between them, so that
many small updates add up to what they add up to in float32. No bit depends on ranks: an element is numbered by its
place in the whole parameter, whichever shard holds it.

The generator is Philox 4x32-10 (Salmon et al., SC 2011), as Random123 and Triton have it. How number i is made:

- key = the first 8 bytes, little-endian, of BLAKE2b-64 of the UTF-8 text "seed/stream/parameter".
- block j (j = 0, 1, …) = philox4x32_10(counter = (j mod 2³², j div 2³², step, 0), key): uint32 w[4j], …, w[4j + 3].
- number i, of 16 bits, is the low half of w[i / 2] for even i, the high half of w[(i - 1) / 2] for odd i.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LEVELS = 3


@dataclass(frozen=True)
class Place:
    """Where the elements of a contiguous shard lie in the flattened whole tensor.

    Element i is number start + i % run + i // run % rows · row_stride + i // run // rows · plane_stride.
    """

    start: int
    run: int
    rows: int
    row_stride: int
    plane_stride: int

    @property
    def contiguous(self) -> bool:
        """Whether elements are numbered without a gap."""
        return self.rows == 1 and self.plane_stride == 0


def place_of(whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Place:
    """The place of the box ``shape`` at ``offset`` of a contiguous tensor of shape ``whole``.

    Raises ValueError for a box that is cut in more than three dimensions.
    """
    start, stride = 0, 1
    levels = [(1, 1)]
    """(length, stride), the innermost first; what has no gaps between is one level."""
    for size, first, length in zip(reversed(whole), reversed(offset), reversed(shape), strict=True):
        start += first * stride
        inner, inner_stride = levels[-1]
        if inner * inner_stride == stride:
            levels[-1] = (inner * length, inner_stride)
        elif length != 1:
            levels.append((length, stride))
        stride *= size
    if len(levels) > LEVELS:
        raise ValueError(f"a box {list(shape)} of {list(whole)} is cut in more than {LEVELS} dimensions")
    (run, _), (rows, row_stride), (_, plane_stride) = [*levels, (1, 0), (1, 0)][:LEVELS]
    return Place(start, run, rows, row_stride, plane_stride)


def key_of(seed: int, stream: str, parameter: str) -> int:
    """The key of a parameter's sequence as a signed 64-bit integer, which is what operators take."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{parameter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(place: Place, count: int, *, key: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 (count,): the 16-bit numbers of a shard's elements in their order."""
    if not count:
        return torch.empty(0, dtype=torch.int32, device=device)
    runs = torch.arange(count // place.run, device=device)
    starts = place.start + runs % place.rows * place.row_stride + runs // place.rows * place.plane_stride
    first = starts // 8
    blocks = first[:, None] + torch.arange((place.run + 7) // 8 + 1, device=device)
    words = torch.stack(philox(blocks & _MASK, blocks >> 32, step & _MASK, 0, key), -1)
    numbers = torch.stack([words & 0xFFFF, words >> 16], -1).flatten(1).int()
    within = (starts - 8 * first)[:, None] + torch.arange(place.run, device=device)
    return numbers.gather(1, within).flatten()


def philox(c0: Tensor, c1: Tensor, c2: int | Tensor, c3: int | Tensor, key: int) -> tuple[Tensor, ...]:
    """Philox 4x32-10 of counters, each int64 below 2³²: four words, int64 below 2³²."""
    k0, k1 = key & _MASK, key >> 32 & _MASK
    words = (c0, c1, torch.as_tensor(c2, device=c0.device), torch.as_tensor(c3, device=c0.device))
    for _ in range(ROUNDS):
        first, third = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]  # their 64 bits; the sign is one of them
        words = (
            (third >> 32 & _MASK) ^ words[1] ^ k0,
            third & _MASK,
            (first >> 32 & _MASK) ^ words[3] ^ k1,
            first & _MASK,
        )
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return words


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """bfloat16 of float32 ``values``, up where ``bits`` (as many numbers below 2¹⁶) carry; not finite ones as they are.

    The expectation over uniform bits is the value itself, exactly.
    """
    pattern = values.contiguous().view(torch.int32)
    # Added to the magnitude, which the pattern holds beside the sign: up is away from zero.
    rounded = (pattern + bits.view(values.shape)) & -0x10000
    finite = (pattern & 0x7F800000) != 0x7F800000
    return torch.where(finite, rounded.view(torch.float32), values).bfloat16()
