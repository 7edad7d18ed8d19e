import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.recipe import OptimRecipe
from headway.train.schedules import learning_rate_factor

kinds = st.sampled_from(["constant", "cosine", "wsd"])
lengths = st.tuples(st.integers(0, 50), st.integers(1, 200), st.integers(1, 50))


def schedule(kind, warmup, stable, decay, low):
    optim = OptimRecipe(schedule=kind, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=low)
    steps = warmup + stable + decay
    return learning_rate_factor(optim, steps), steps


@given(kinds, lengths, st.floats(0, 1))
def test_every_factor_lies_between_the_first_warm_up_step_or_the_minimum_and_one(kind, parts, low):
    factor, steps = schedule(kind, *parts, low)
    floor = min(low, 1 / parts[0] if parts[0] else 1.0)
    assert all(floor - 1e-12 <= factor(step) <= 1 + 1e-12 for step in range(steps + 5))


@given(kinds, lengths, st.floats(0, 1))
def test_warm_up_rises_by_equal_steps_to_one_and_nothing_rises_after_it(kind, parts, low):
    warmup = parts[0]
    factor, steps = schedule(kind, *parts, low)
    assert [factor(step) for step in range(warmup)] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    after = [factor(step) for step in range(warmup, steps)]
    assert after[0] == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))


@given(lengths, st.floats(0, 1))
def test_wsd_is_stable_until_the_last_decay_steps_and_then_a_line_to_the_minimum(parts, low):
    warmup, stable, decay = parts
    factor, steps = schedule("wsd", warmup, stable, decay, low)
    assert all(factor(step) == 1.0 for step in range(warmup, warmup + stable + 1))
    line = [1 - (1 - low) * done / decay for done in range(decay)]
    assert [factor(step) for step in range(steps - decay, steps)] == pytest.approx(line)
    assert factor(steps) == pytest.approx(low)


@given(lengths, st.floats(0, 1))
def test_cosine_passes_its_middle_half_way_and_ends_at_the_minimum(parts, low):
    factor, steps = schedule("cosine", *parts, low)
    warmup = parts[0]
    assert factor(steps) == pytest.approx(low, abs=1e-12)
    if (steps - warmup) % 2 == 0:
        assert factor((warmup + steps) // 2) == pytest.approx((1 + low) / 2)


def test_constant_stays_at_one():
    factor, steps = schedule("constant", 0, 10, 1, 0.0)
    assert [factor(step) for step in range(steps)] == [1.0] * steps
