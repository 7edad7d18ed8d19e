"""Collectives of all ranks side by side: who came last, waiting against transfer, clocks that differ."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.explain.collectives import RankCollectives, align, clock_offsets_ns

MS = 1_000_000


def rank_of(rank: int, starts, ends, sizes=None, clock: int = 0) -> RankCollectives:
    count = len(starts)
    return RankCollectives(
        rank=rank,
        key=tuple(("group 0", "all_reduce", number) for number in range(count)),
        start_ns=np.array(starts) + clock,
        end_ns=np.array(ends) + clock,
        bytes=np.full(count, -1) if sizes is None else np.array(sizes),
        step=np.zeros(count, dtype=np.int64),
        names=("ncclDevKernel_AllReduce",) * count,
        span=np.arange(count),
    )


arrivals = st.lists(st.lists(st.integers(0, 5 * MS), min_size=3, max_size=3), min_size=3, max_size=8)


@settings(deadline=None, max_examples=60)
@given(arrivals, st.lists(st.integers(-(10**12), 10**12), min_size=3, max_size=3))
def test_clocks_that_differ_change_nothing(late, clocks):
    """What is measured on clocks hours apart is what one clock would have measured."""
    starts = [[at * 20 * MS + rank_late[rank] for at, rank_late in enumerate(late)] for rank in range(3)]
    ends = [at * 20 * MS + 10 * MS for at in range(len(late))]
    (same,) = align([rank_of(rank, starts[rank], ends) for rank in range(3)])
    (apart,) = align([rank_of(rank, starts[rank], ends, clock=clocks[rank]) for rank in range(3)])
    assert np.array_equal(same.wait_ns, apart.wait_ns)
    assert np.array_equal(same.transfer_ns, apart.transfer_ns)
    assert np.array_equal(same.last_rank, apart.last_rank)
    assert np.array_equal(
        same.wait_ns[range(len(late)), [ranks.index(max(ranks)) for ranks in np.array(late).tolist()]],
        np.zeros(len(late)),
    )


def test_an_offset_within_the_scatter_of_the_ends_is_none():
    ends = np.array([10, 30, 50, 70]) * MS
    scattered = ends + np.array([3_000, -2_000, 4_000, -3_000])
    (aligned,) = align([rank_of(0, ends - MS, ends), rank_of(1, ends - MS, scattered)])
    assert not aligned.offset_ns.any()
    (ahead,) = align([rank_of(0, ends - MS, ends), rank_of(1, ends - MS, scattered, clock=40_000)])
    assert ahead.offset_ns.tolist() == pytest.approx([0, 40_000], abs=4_000)


def test_collectives_that_do_not_end_together_are_left_out():
    ends = np.array([10, 30, 50, 70]) * MS
    odd = ends + np.array([0, 0, 7 * MS, 0])
    (aligned,) = align([rank_of(0, ends - MS, ends), rank_of(1, ends - MS, odd)])
    assert [key[2] for key in aligned.key] == [0, 1, 3]
    assert aligned.left_out == 1


def test_gloo_ends_when_its_threads_get_a_core():
    ends = np.array([10, 30, 50, 70]) * MS
    odd = ends + np.array([0, 0, 7 * MS, 0])
    ranks = [rank_of(0, ends - MS, ends), rank_of(1, ends - MS, odd)]
    (aligned,) = align([replace(one, names=("gloo:all_reduce",) * 4) for one in ranks])
    assert len(aligned) == 4


def in_group(one: RankCollectives, group: str) -> RankCollectives:
    return replace(one, key=tuple((group, kind, number) for _, kind, number in one.key))


def test_ranks_without_a_common_collective_are_not_aligned():
    assert align([rank_of(0, [0], [MS])]) == ()
    assert align([rank_of(0, [0], [MS]), in_group(rank_of(1, [0], [MS]), "group 1")]) == ()


def test_of_a_mesh_each_group_is_aligned_by_itself_and_clocks_are_followed_from_group_to_group():
    """Two rows and two columns; each rank's clock is 10 ms further ahead than the one before."""
    starts, ends = np.array([0, 20, 40]) * MS, np.array([10, 30, 50]) * MS
    ranks = []
    for number in range(4):
        row = in_group(rank_of(number, starts, ends, clock=10 * MS * number), f"row {number // 2}")
        column = in_group(
            rank_of(number, starts + 3 * MS, ends + 3 * MS, clock=10 * MS * number), f"column {number % 2}"
        )
        columns = {name: np.concatenate([getattr(row, name), getattr(column, name)]) for name in ("start_ns", "end_ns")}
        ranks.append(
            replace(
                row, key=row.key + column.key, bytes=np.full(6, -1), step=np.zeros(6, np.int64),
                names=row.names * 2, span=np.arange(6), **columns,
            )
        )  # fmt: skip
    aligned = align(ranks)
    assert sorted(one.ranks for one in aligned) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert all(len(one) == 3 and one.left_out == 0 for one in aligned)
    assert all(not one.wait_ns.any() for one in aligned)
    assert clock_offsets_ns(aligned) == {number: 10 * MS * number for number in range(4)}
