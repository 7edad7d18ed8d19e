"""What the caching allocator reserves, what holds the peak, whether a step fits: against cases worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.cluster import Cluster
from headway.rehearse.allocator import CachingAllocator, OutOfMemory
from headway.rehearse.memory import Memory, memory_of
from headway.rehearse.record import Record
from headway.rehearse.simulate import Ranged
from rehearsed_steps import Step, exact_cluster, played

MIB = 2**20
moderate = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


# The allocator


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB + 1, 22 * MIB, 22 * MIB),
        (21 * MIB + 512, 21 * MIB + 512, 22 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(asked, allocated, reserved):
    """A rest of up to 1 MiB is not split off a large block: it counts as allocated."""
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == reserved
    assert allocator.allocated == (reserved if 0 < reserved - allocated <= MIB and asked > MIB else allocated)


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(29 * MIB + 512).address == small.address
    assert allocator.reserved == 70 * MIB


def test_free_neighbours_are_joined():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert allocator.allocate(15 * MIB).address == blocks[0].address
    assert allocator.reserved == 20 * MIB


def test_memory_in_pieces_is_of_no_use_to_a_larger_block():
    """Six of 4 MiB, every other one freed: 12 MiB are free and none of them serves 8."""
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (plain, expandable):
        blocks = [allocator.allocate(4 * MIB) for _ in range(10)]
        for block in blocks[0:10:2]:
            allocator.free(block)
        allocator.allocate(8 * MIB)
    assert plain.reserved == 60 * MIB
    assert expandable.reserved == 60 * MIB
    grown, pieces = CachingAllocator(expandable=True), CachingAllocator()
    for allocator in (grown, pieces):
        for size in (30, 40, 50):
            allocator.free(allocator.allocate(size * MIB))
    assert pieces.reserved == 120 * MIB
    assert grown.reserved == 60 * MIB  # three pages of 20 MiB


def test_a_stream_does_not_take_what_another_has_freed():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, "compute"))
    allocator.allocate(20 * MIB, "fsdp all-gather")
    assert allocator.reserved == 40 * MIB
    allocator.allocate(20 * MIB, "compute")
    assert allocator.reserved == 40 * MIB


def test_at_the_limit_cached_segments_are_given_back():
    allocator = CachingAllocator(limit=60 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(20 * MIB)  # out of the cached 40
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)
    other = CachingAllocator(limit=60 * MIB)
    other.free(other.allocate(30 * MIB))
    other.allocate(40 * MIB)
    assert (other.retries, other.reserved) == (1, 40 * MIB)


requests = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 3000), st.integers(1, 40 * MIB)),
        st.sampled_from(["compute", "fsdp all-gather"]),
        st.integers(0, 1 << 30),
    ),
    min_size=1,
    max_size=60,
)


@moderate
@given(requests, st.booleans())
def test_blocks_never_overlap_and_all_is_free_in_the_end(items, expandable):
    allocator = CachingAllocator(expandable=expandable)
    held = []
    for size, stream, which in items:
        held.append(allocator.allocate(size, stream))
        assert held[-1].size >= size
        if which % 3 == 0:
            allocator.free(held.pop(which % len(held)))
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated == sum(block.size for block in held)
        assert allocator.reserved >= allocator.allocated
        assert allocator.peak_reserved >= allocator.peak_allocated
    for block in held:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator._give_back_cached()
    assert allocator.reserved == 0


@moderate
@given(requests)
def test_a_limit_that_was_never_reached_changes_nothing(items):
    free, bound = CachingAllocator(), None
    for _ in range(2):
        allocator = bound or free
        held = []
        for size, stream, which in items:
            held.append(allocator.allocate(size, stream))
            if which % 2:
                allocator.free(held.pop(which % len(held)))
        bound = CachingAllocator(limit=free.peak_reserved)
    assert allocator.retries == 0
    assert allocator.reserved == free.reserved


# A step


def remembered(record: Record, cluster: Cluster) -> Memory:
    return memory_of(record.allocations, played([record], cluster).ranks[0], cluster)


def example() -> Step:
    """100 MiB of weights, two blocks whose activations of 30 MiB each wait for the backward pass, gradients at last."""
    step = Step()
    for category, size in (("parameter", 40), ("optimizer", 60)):
        step.allocate(size * MIB, category, before=True, module="blocks.0.weight")
    kept = []
    for block in ("blocks.0", "blocks.1"):
        step.run(10, module=block)
        kept.append(step.allocate(30 * MIB, "activation", module=f"{block}.attention"))
    for block in ("blocks.1", "blocks.0"):
        gradient = step.allocate(8 * MIB, "gradient", module=f"{block}.weight")
        step.run(10, phase="backward", module=block)
        step.free(kept.pop())
    step.free(gradient)
    step.free(gradient - 1)
    step.run(10, phase="optimizer")
    return step


def test_the_peak_and_what_holds_it():
    memory = remembered(example().record(), exact_cluster())
    assert memory.before == 100 * MIB
    assert memory.peak_bytes == 168 * MIB
    assert memory.peak_operator == 2
    held = {holding.name: (holding.bytes // MIB, holding.count) for holding in memory.categories}
    assert held == {"parameter": (40, 1), "optimizer": (60, 1), "activation": (60, 2), "gradient": (8, 1)}
    modules = {holding.name: holding.bytes // MIB for holding in memory.modules}
    assert modules == {"Block: weight": 108, "Block: attention": 60}
    assert memory.held.max() == memory.peak_bytes
    assert memory.held[-1] == memory.before
    assert memory.reserved_bytes >= memory.peak_bytes
    assert memory.peak.low < memory.peak.value < memory.peak.high


def test_the_cpu_holds_what_is_asked_for_and_the_interpreter():
    known = exact_cluster()
    cpu = known.model_copy(update={"accelerator": known.accelerator.model_copy(update={"form": "CPU"})})
    step = example()
    odd = step.allocate(1001, "temporary")
    step.free(odd)
    memory = remembered(step.record(), cpu)
    assert memory.peak_bytes == 168 * MIB
    assert memory.peak.value > 168 * MIB + 0.4 * 2**30
    assert memory.out_of_memory_probability is None


def test_running_out_is_probable_where_more_is_needed_than_there_is():
    def chance(needed: float) -> float:
        memory = remembered(example().record(), exact_cluster())
        there = Ranged(79.0, 77.0, 80.0)
        return replace(memory, needed=Ranged(needed, 0.97 * needed, 1.06 * needed), usable=there)

    probabilities = [chance(needed).out_of_memory_probability for needed in (20, 60, 76, 79, 82, 100)]
    assert probabilities == sorted(probabilities)
    assert probabilities[0] < 1e-6
    assert probabilities[3] == pytest.approx(0.5)
    assert probabilities[5] > 0.99
    # At the end of the range one in ten: where only what is needed is uncertain.
    exact = replace(chance(79.0 / 1.06), usable=Ranged(79.0, 79.0, 79.0))
    assert exact.out_of_memory_probability == pytest.approx(0.1, abs=1e-3)


def test_a_step_that_only_fits_without_what_is_cached_is_told_from_one_that_does_not():
    step = Step()
    step.run(1)
    for size in range(30, 90, 10):
        step.free(step.allocate(size * MIB))
    memory: Memory = remembered(step.record(), exact_cluster())
    assert memory.reserved_bytes == sum(range(30, 90, 10)) * MIB
    small = exact_cluster()
    accelerator = small.accelerator.model_copy(update={"memory_gb": 0.8})
    tight = remembered(step.record(), small.model_copy(update={"accelerator": accelerator}))
    assert tight.needed.value < memory.needed.value - 100 * MIB
