"""Which tokens of a sequence each rank has, and which keys its queries see at each step of the ring.

A sequence is cut into one part for each rank of the ring, and each part, as its tokens are ordered there, into equal
pieces for the ranks of an all-to-all group. Everything here is arithmetic on lengths: nothing depends on values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

WHOLE = slice(None)


@dataclass(frozen=True)
class Block:
    """Queries of this rank's part, and keys of a part that they see: all of them, or each query those up to itself."""

    queries: slice
    keys: tuple[slice, ...]
    causal: bool = False


Steps = tuple[tuple[Block, ...], ...]
"""For each rank of the ring, the blocks to compute with that rank's keys."""


def take(tensor: Tensor, slices: Sequence[slice], dim: int) -> Tensor:
    """The concatenation of ``slices`` along ``dim``: a view when it is a single one."""
    index = (WHOLE,) * dim
    pieces = [tensor[(*index, piece)] for piece in slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


@dataclass(frozen=True)
class CausalSplit:
    """Sequences in which tokens see only earlier ones.

    The ring is zig-zag: rank r of n has chunks r and 2n-1-r out of 2n, so that every rank computes as many products
    at each step, in blocks without a mask (but for its own, which is causal). Without a ring, pieces are contiguous.
    """

    ring: int
    ulysses: int
    local_multiple: int = 1
    """Each rank's number of tokens is a multiple of this."""

    def padded(self, length: int) -> int:
        """``length`` up to the next one that divides: padding goes after the sequence, where no token sees it."""
        chunks = 1 if self.ring == 1 else 2 * self.ring
        multiple = math.lcm(chunks, self.ring * self.ulysses * self.local_multiple)
        return -(-length // multiple) * multiple

    def part(self, length: int, ring_rank: int) -> list[slice]:
        """Where the tokens of a part are in a sequence of a padded ``length``, in the part's order."""
        if self.ring == 1:
            return [slice(0, length)]
        chunk = length // (2 * self.ring)
        places = (ring_rank, 2 * self.ring - 1 - ring_rank)
        return [slice(place * chunk, (place + 1) * chunk) for place in places]

    def piece(self, length: int, ring_rank: int, ulysses_rank: int) -> list[slice]:
        """Where the tokens of one rank are in a sequence of a padded ``length``, in the rank's order."""
        size = length // (self.ring * self.ulysses)
        first, last = ulysses_rank * size, (ulysses_rank + 1) * size
        found, passed = [], 0
        for run in self.part(length, ring_rank):
            start, stop = max(first - passed, 0), min(last - passed, run.stop - run.start)
            if start < stop:
                found.append(slice(run.start + start, run.start + stop))
            passed += run.stop - run.start
        return found

    def steps(self, length: int, ring_rank: int) -> Steps:
        """What a part's queries see of each part's keys."""
        parts = [self.part(length, rank) for rank in range(self.ring)]
        return tuple(
            (Block(WHOLE, (WHOLE,), causal=True),) if rank == ring_rank else _earlier(parts[ring_rank], keys)
            for rank, keys in enumerate(parts)
        )


def _earlier(queries: list[slice], keys: list[slice]) -> tuple[Block, ...]:
    """Blocks of another part's keys. Runs do not overlap and are in order, so each query run sees a prefix of keys."""
    blocks: list[Block] = []
    start = 0
    for run in queries:
        stop = start + run.stop - run.start
        seen = sum(key.stop - key.start for key in keys if key.start < run.start)
        if seen and blocks and blocks[-1].keys[0].stop == seen:
            blocks[-1] = Block(slice(blocks[-1].queries.start, stop), blocks[-1].keys)
        elif seen:
            blocks.append(Block(slice(start, stop), (slice(0, seen),)))
        start = stop
    return tuple(blocks)


@dataclass(frozen=True)
class StreamSplit:
    """Streams of tokens (text, image) that attend to each other without order.

    Each stream is split by itself: every rank has a piece of each, all of one length, padded at the end of the stream.
    No query sees padding: it is left out of the keys.
    """

    ring: int
    ulysses: int

    def local(self, length: int) -> int:
        """Tokens of a stream on each rank, padding included."""
        return -(-length // (self.ring * self.ulysses))

    def shard(self, tensor: Tensor, dim: int, place: int) -> Tensor:
        """The piece of rank ``place``; padded with zeros."""
        size = self.local(tensor.shape[dim])
        start = min(place * size, tensor.shape[dim])
        piece = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
        missing = size - piece.shape[dim]
        if not missing:
            return piece
        return functional.pad(piece, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))

    def steps(self, lengths: Sequence[int]) -> Steps:
        """What queries see of each part's keys; ``lengths`` are the streams', in the order they are joined in."""
        return tuple(
            (Block(WHOLE, keys),) if (keys := self._valid(lengths, ring_rank)) else () for ring_rank in range(self.ring)
        )

    def _valid(self, lengths: Sequence[int], ring_rank: int) -> tuple[slice, ...]:
        """Tokens of a ring part that are not padding: the pieces of its all-to-all group one after the other."""
        found: list[slice] = []
        start = 0
        for place in range(ring_rank * self.ulysses, (ring_rank + 1) * self.ulysses):
            for length in lengths:
                size = self.local(length)
                valid = min(max(length - place * size, 0), size)
                if valid and found and found[-1].stop == start:
                    found[-1] = slice(found[-1].start, start + valid)
                elif valid:
                    found.append(slice(start, start + valid))
                start += size
        return tuple(found)
