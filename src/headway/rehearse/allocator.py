"""A model of torch's caching allocator for CUDA: what it reserves for what a program asks for.

After c10/cuda/CUDACachingAllocator.cpp with its default settings. Sizes are rounded up to 512 bytes. Up to 1 MiB comes
from segments of 2 MiB; up to 10 MiB from segments of 20 MiB; more from segments of its own, a multiple of 2 MiB. A
segment belongs to the stream that asked for it and to small or large blocks; the smallest free block that is large
enough is taken and split, and neighbours that are free are joined. When the device has no more memory, segments that
are free as a whole are given back. With ``expandable`` segments there is one a stream and pool, which grows by pages at
its end, so that what is free in it is never too small for being in pieces of segments.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUND = 512
SMALL = 1 << 20
"""The largest block of the small pool, and in the large pool the smallest rest that is split off."""
SMALL_SEGMENT = 2 << 20
MEDIUM = 10 << 20
"""From here on a block has a segment of its own."""
MEDIUM_SEGMENT = 20 << 20
LARGE_MULTIPLE = 2 << 20


class OutOfMemory(Exception):  # noqa: N818 - torch's name for it
    """The limit is reached, and nothing cached can be given back."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    pool: "Pool"
    size: int
    address: int
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False

    @property
    def is_whole_segment(self) -> bool:
        """Whether nothing else is in its segment."""
        return self.before is None and self.after is None


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of one stream and one of the two sizes, the smallest first, among equals by address."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    last: Block | None = None
    """With expandable segments: the block at the end of the pool's one segment."""

    def add(self, block: Block) -> None:
        """Keep ``block`` for later."""
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """``block`` is taken, or becomes a part of a larger one."""
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """Follows allocations and frees in the order in which the host makes them."""

    def __init__(self, *, limit: int | None = None, expandable: bool = False) -> None:
        """``limit``: bytes that can be reserved; None: any number."""
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """How often cached segments were given back to make room; each waits for the device."""
        self._limit = limit
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._next_address = 0

    def allocate(self, size: int, stream: str = "") -> Block:
        """A block of at least ``size`` bytes for ``stream``. Raises OutOfMemory when the limit does not allow it."""
        wanted = max(ROUND, -(-size // ROUND) * ROUND)
        pool = self._pools.get((stream, wanted <= SMALL))
        if pool is None:
            pool = self._pools[stream, wanted <= SMALL] = Pool(wanted <= SMALL)
        place = bisect_left(pool.free, (wanted, -1))
        if place < len(pool.free):
            block = pool.free.pop(place)[2]
            block.free = False
        else:
            block = self._new(pool, wanted)
        rest = block.size - wanted
        if rest >= ROUND if pool.small or self._expandable else rest > SMALL:
            self._split(block, wanted)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give ``block`` back. (No part of a step uses ``record_stream``, which would hold it for longer.)"""
        self.allocated -= block.size
        pool = block.pool
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
                block = _joined(neighbour, block) if neighbour is block.before else _joined(block, neighbour)
        pool.add(block)

    def _new(self, pool: Pool, wanted: int) -> Block:
        """A new segment, or with expandable ones the end of the pool's own with new pages behind it."""
        if self._expandable:
            return self._expanded(pool, wanted)
        size = SMALL_SEGMENT if pool.small else MEDIUM_SEGMENT
        if wanted >= MEDIUM:
            size = -(-wanted // LARGE_MULTIPLE) * LARGE_MULTIPLE
        self._reserve(size)
        return self._at_new_address(pool, size)

    def _expanded(self, pool: Pool, wanted: int) -> Block:
        page = SMALL_SEGMENT if pool.small else MEDIUM_SEGMENT
        end = pool.last
        held = end.size if end is not None and end.free else 0
        pages = -(-(wanted - held) // page) * page
        self._reserve(pages)
        if end is not None and end.free:
            pool.remove(end)
            end.size += pages
            return end
        if end is None:
            pool.last = self._at_new_address(pool, pages)
            self._next_address += 1 << 60  # room to grow in
        else:
            pool.last = Block(pool, pages, end.address + end.size, before=end)
            end.after = pool.last
        return pool.last

    def _at_new_address(self, pool: Pool, size: int) -> Block:
        block = Block(pool, size, self._next_address)
        self._next_address += size
        return block

    def _split(self, block: Block, wanted: int) -> None:
        rest = Block(block.pool, block.size - wanted, block.address + wanted, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, wanted
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.add(rest)

    def _reserve(self, size: int) -> None:
        if self._limit is not None and self.reserved + size > self._limit:
            self._give_back_cached()
            self.retries += 1
            if self.reserved + size > self._limit:
                raise OutOfMemory
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back_cached(self) -> None:
        """Give back all segments that are free as a whole, and free pages at their ends.

        (Of expandable ones torch gives back free pages in the midst too.)
        """
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if block.is_whole_segment:
                    pool.remove(block)
                    self.reserved -= block.size
                    pool.last = None
                elif block is pool.last:
                    page = SMALL_SEGMENT if pool.small else MEDIUM_SEGMENT
                    self.reserved -= block.size // page * page
                    pool.remove(block)
                    block.size %= page
                    if block.size:
                        pool.add(block)
                    else:
                        assert block.before is not None
                        pool.last, block.before.after = block.before, None


def _joined(first: Block, second: Block) -> Block:
    """``first`` with ``second`` behind it."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    if first.pool.last is second:
        first.pool.last = first
    return first
