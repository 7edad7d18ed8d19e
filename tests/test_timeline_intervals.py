"""Interval algebra is exact: it agrees with counting the instants one by one."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.timeline import Intervals

END = 40
"""Instants 0 … END - 1 are counted."""
instants = st.integers(0, END)
pairs = st.lists(st.tuples(instants, instants), max_size=12)
EPOCH = 1_712_195_495_505_582_988
"""ns since 1970: a float64 holds such an instant to 256 ns only."""


def made(intervals) -> Intervals:
    return Intervals.union_of([a for a, _ in intervals], [b for _, b in intervals])


def counted(intervals) -> np.ndarray:
    """Which instants are covered, one by one."""
    covered = np.zeros(END, dtype=bool)
    for a, b in intervals:
        covered[a:b] = True
    return covered


def members(found: Intervals) -> np.ndarray:
    return counted(zip(found.starts.tolist(), found.ends.tolist(), strict=True))


def assert_canonical(found: Intervals) -> None:
    assert (found.starts < found.ends).all()
    assert (found.ends[:-1] < found.starts[1:]).all()
    assert found.starts.dtype == found.ends.dtype == np.int64


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs)
def test_a_union_covers_what_any_interval_covers(intervals):
    found = made(intervals)
    assert_canonical(found)
    assert (members(found) == counted(intervals)).all()
    assert found.total_ns() == counted(intervals).sum()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, pairs)
def test_union_intersection_and_difference_are_those_of_sets(first, second):
    a, b = made(first), made(second)
    for found, expected in (
        (a | b, counted(first) | counted(second)),
        (a & b, counted(first) & counted(second)),
        (a - b, counted(first) & ~counted(second)),
    ):
        assert_canonical(found)
        assert (members(found) == expected).all()
    assert a | b == b | a
    assert a & b == b & a
    assert (a - b) | (a & b) == a
    assert (a | b).total_ns() == a.total_ns() + b.total_ns() - (a & b).total_ns()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, pairs)
def test_a_part_of_a_set_is_its_intersection_with_a_window(intervals, windows):
    for start, end in windows:
        found = made(intervals).within(start, end)
        assert_canonical(found)
        assert found == made(intervals) & made([(start, end)])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, pairs)
def test_coverage_of_each_interval_is_counted_alone(covering, asked):
    found = made(covering).covered_ns([a for a, _ in asked], [b for _, b in asked])
    assert found.tolist() == [int(counted(covering)[a:b].sum()) for a, b in asked]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, st.lists(st.integers(0, END - 1)))
def test_an_instant_is_in_the_set_from_a_start_until_before_an_end(intervals, asked):
    assert made(intervals).contains(asked).tolist() == counted(intervals)[asked].tolist()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, instants, instants)
def test_gaps_and_coverage_make_up_a_window(intervals, begin, end):
    found, window = made(intervals), Intervals.union_of([begin], [end])
    gaps = found.gaps_in(begin, end)
    assert (gaps & found).total_ns() == 0
    assert gaps | (found & window) == window


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs, pairs)
def test_nothing_is_rounded_at_instants_since_1970(first, second):
    near = [made(intervals) for intervals in (first, second)]
    far = [Intervals.union_of(found.starts + EPOCH, found.ends + EPOCH) for found in near]
    for combine in (Intervals.__or__, Intervals.__and__, Intervals.__sub__):
        here, there = combine(*near), combine(*far)
        assert (there.starts - EPOCH == here.starts).all()
        assert (there.ends - EPOCH == here.ends).all()
        assert there.total_ns() == here.total_ns()
