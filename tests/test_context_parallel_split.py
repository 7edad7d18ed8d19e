"""Every token is on one rank, every pair that is to be seen in one block, and every rank has as much to do."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.parallel.context_parallel.split import CausalSplit, StreamSplit, take

SIZES = st.integers(1, 5)


def covered(blocks: object, queries: int, keys: int) -> torch.Tensor:
    """How often each (query, key) of two parts is computed."""
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    numbers = torch.arange(keys)
    for block in blocks:  # type: ignore[attr-defined]
        rows = torch.arange(queries)[block.queries]
        columns = take(numbers, block.keys, 0)
        pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
        seen[rows[:, None], columns[None]] += pairs.tril() if block.causal else pairs
    return seen


@given(ring=SIZES, ulysses=SIZES, multiple=st.integers(1, 4), length=st.integers(1, 300))
def test_every_token_of_a_causal_sequence_is_on_one_rank(ring: int, ulysses: int, multiple: int, length: int) -> None:
    split = CausalSplit(ring, ulysses, multiple)
    padded = split.padded(length)
    assert length <= padded < length + 2 * ring * ulysses * multiple
    assert padded // (ring * ulysses) % multiple == 0
    whole = torch.arange(padded)
    pieces = [
        take(whole, split.piece(padded, ring_rank, rank), 0) for ring_rank in range(ring) for rank in range(ulysses)
    ]
    assert {len(piece) for piece in pieces} == {padded // (ring * ulysses)}
    assert torch.cat(pieces).sort().values.equal(whole)
    for ring_rank in range(ring):
        part = take(whole, split.part(padded, ring_rank), 0)
        assert torch.cat(pieces[ring_rank * ulysses : (ring_rank + 1) * ulysses]).equal(part)


@given(ring=SIZES, ulysses=SIZES, length=st.integers(1, 60))
def test_the_blocks_of_all_steps_are_the_causal_mask(ring: int, ulysses: int, length: int) -> None:
    split = CausalSplit(ring, ulysses)
    padded = split.padded(length)
    whole = torch.arange(padded)
    parts = [take(whole, split.part(padded, rank), 0) for rank in range(ring)]
    work = []
    for rank, queries in enumerate(parts):
        steps = split.steps(padded, rank)
        for keys, blocks in zip(parts, steps, strict=True):
            assert covered(blocks, len(queries), len(keys)).equal((queries[:, None] >= keys[None]).long())
        assert all(len(blocks) == 1 and not blocks[0].causal for step, blocks in enumerate(steps) if step != rank)
        work.append(sum(int(covered(blocks, len(queries), len(keys)).sum()) for blocks in steps))
    assert len(set(work)) == 1, "ranks have unequal work"


@given(ring=SIZES, ulysses=SIZES, lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_every_token_of_joined_streams_is_a_key_once_and_padding_never(
    ring: int, ulysses: int, lengths: list[int]
) -> None:
    split = StreamSplit(ring, ulysses)
    streams = [torch.arange(1, length + 1) + 1000 * stream for stream, length in enumerate(lengths)]
    pieces = [torch.cat([split.shard(stream, 0, place) for stream in streams]) for place in range(ring * ulysses)]
    assert {len(piece) for piece in pieces} == {sum(map(split.local, lengths))}
    found = []
    for ring_rank, blocks in enumerate(split.steps(lengths)):
        part = torch.cat(pieces[ring_rank * ulysses : (ring_rank + 1) * ulysses])
        found += [take(part, block.keys, 0) for block in blocks]
    assert torch.cat(found).sort().values.equal(torch.cat(streams).sort().values)


@given(ring=SIZES, length=st.integers(1, 40), dim=st.integers(0, 2))
def test_a_stream_comes_together_again(ring: int, length: int, dim: int) -> None:
    split = StreamSplit(ring, 1)
    whole = torch.rand(*[length if axis == dim else 2 for axis in range(3)])
    again = torch.cat([split.shard(whole, dim, place) for place in range(ring)], dim)
    assert again.narrow(dim, 0, length).equal(whole)
    assert not again.narrow(dim, length, again.shape[dim] - length).any()
