"""Counter-based randomness: every number is a function of (seed, stream, position, step), never of a rank or worker.

The generator is Philox 4x64-10 (Salmon et al., SC 2011), as numpy and Random123 have it. How number i is made:

- key = (seed, h), two uint64: h is the first 8 bytes, little-endian, of BLAKE2b-64 of the stream's UTF-8 name.
- block j (j = 0, 1, …) = philox4x64_10(counter = (j + 1, position, step, 0), key): four uint64 w[4j], …, w[4j + 3].
  (numpy adds 1 to the counter before it makes a block.)
- lo(q) and hi(q) are the low and high 32 bits of w[q].
- uniform i is (x >> 8) · 2⁻²⁴ in float32, x = lo(i / 2) for even i and hi((i - 1) / 2) for odd i.
  24 bits fit a float32 exactly, so that the result is never rounded up to 1.
- normals 2q and 2q + 1 are r·cos(a) and r·sin(a) in float32 (Box & Muller 1958), with
  r = sqrt(-2·ln(float32(lo(q) | 1)·2⁻³²)) and a = float32(hi(q))·float32(2π·2⁻³²). The last bit of lo(q) is set so that
  the logarithm is finite; |normal| is at most 6.66.

The integers are the same everywhere; ln, sin and cos may differ by an ulp between machines.
"""

import hashlib
import math
import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

_MASK = 2**64 - 1
_NO_WORDS = np.zeros(4, dtype=np.uint64)
_thread = threading.local()


def normal(shape: Sequence[int], *, seed: int, stream: str, position: int, step: int, offset: int = 0) -> torch.Tensor:
    """Standard normal float32 of ``shape``: numbers offset, offset + 1, … of the sequence, in row-major order.

    With ``offset`` a slice [a, b) of a larger flattened tensor is drawn alone: ``normal((b - a,), …, offset=a)``.
    """
    return normals(shape, seed=seed, stream=stream, positions=[position], step=step, offset=offset)[0]


def normals(
    shape: Sequence[int], *, seed: int, stream: str, positions: Sequence[int], step: int, offset: int = 0
) -> torch.Tensor:
    """float32 (len(positions), *shape): what ``normal`` gives for each position, in a fraction of the calls' time."""
    count = math.prod(shape)
    first_pair = offset // 2
    pairs = -(-(offset + count) // 2) - first_pair
    words = np.empty((len(positions), pairs), dtype="<u8")
    for row, position in zip(words, positions, strict=True):
        row[:] = _words(first_pair, pairs, seed, stream, position, step)
    halves = words.view("<u4")
    radius = (halves[:, 0::2] | np.uint32(1)).astype(np.float32)
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = halves[:, 1::2].astype(np.float32)
    angle *= np.float32(2.0 * math.pi * 2.0**-32)
    values = np.empty((len(positions), 2 * pairs), dtype=np.float32)
    np.multiply(radius, np.cos(angle), out=values[:, 0::2])
    np.multiply(radius, np.sin(angle), out=values[:, 1::2])
    skipped = offset - 2 * first_pair
    chosen = torch.from_numpy(values[:, skipped : skipped + count])
    return chosen.contiguous().view(len(positions), *shape)


def uniform(count: int, *, seed: int, stream: str, position: int, step: int, offset: int = 0) -> torch.Tensor:
    """Uniform float32 (count,) in [0, 1): numbers offset, offset + 1, … of the sequence."""
    first = offset // 2
    words = -(-(offset + count) // 2) - first
    halves = _words(first, words, seed, stream, position, step).astype("<u8", copy=False).view("<u4")
    values = (halves >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    skipped = offset - 2 * first
    return torch.from_numpy(values[skipped : skipped + count])


def permutation(size: int, *, seed: int, stream: str, step: int) -> np.ndarray:
    """A permutation of range(size), int64: the order that sorts the first ``size`` words of position 0.

    Equal words keep their order. Why not numpy's ``Generator.permutation``: only a bit generator's words are promised
    to stay the same in later versions of numpy.
    """
    return np.argsort(_words(0, size, seed, stream, 0, step), kind="stable")


def _words(first: int, count: int, seed: int, stream: str, position: int, step: int) -> np.ndarray:
    """uint64 (count,): words w[first], w[first + 1], … of the sequence."""
    block, skipped = divmod(first, 4)
    key = np.array([seed & _MASK, _stream_key(stream)], dtype=np.uint64)
    counter = np.array([block, position & _MASK, step & _MASK, 0], dtype=np.uint64)
    # A generator of each thread's own is set to its place, as to make one takes ten times as long.
    if not hasattr(_thread, "generator"):
        _thread.generator = np.random.Philox(0)
    _thread.generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": counter, "key": key},
        "buffer": _NO_WORDS,
        "buffer_pos": len(_NO_WORDS),
        "has_uint32": 0,
        "uinteger": 0,
    }
    return _thread.generator.random_raw(skipped + count)[skipped:]


@lru_cache
def _stream_key(stream: str) -> int:
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
