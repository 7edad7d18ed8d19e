"""The order of records: each epoch a permutation of its own, from the seed alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import SampleOrder


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 200), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    order = SampleOrder(size, seed, shuffle=True)
    records = [order.record(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert {found for found, _ in records} == {epoch}
    assert sorted(index for _, index in records) == list(range(size))


def test_epochs_and_seeds_differ():
    def epoch(seed, number):
        order = SampleOrder(100, seed, shuffle=True)
        return tuple(order.record(position)[1] for position in range(number * 100, (number + 1) * 100))

    assert len({epoch(seed, number) for seed in range(3) for number in range(3)}) == 9


def test_a_position_means_the_same_record_however_one_comes_to_it():
    straight = SampleOrder(37, 5, shuffle=True)
    expected = [straight.record(position) for position in range(37 * 6)]
    jumping = SampleOrder(37, 5, shuffle=True)
    for position in sorted(range(37 * 6), key=lambda position: position * 7919 % 1009):
        assert jumping.record(position) == expected[position]


def test_without_shuffling_records_come_in_order():
    order = SampleOrder(3, 0, shuffle=False)
    assert [order.record(position) for position in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_memory_does_not_grow_with_epochs():
    order = SampleOrder(10, 0, shuffle=True)
    for position in range(1000):
        order.record(position)
    assert len(order._orders) == 2
