"""Noise is a function of (seed, stream, position, step): reproducible, cuttable, uncorrelated, of the right shape."""

import hashlib
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import normal, normals, uniform
from headway.data.randomness import permutation

KEY = {"seed": 7, "stream": "noise", "position": 11, "step": 3}
keys = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "stream": st.text(max_size=8),
        "position": st.integers(0, 2**63 - 1),
        "step": st.integers(0, 2**63 - 1),
    }
)


@settings(deadline=None, max_examples=80)
@given(key=keys, count=st.integers(0, 70), begin=st.integers(0, 70), length=st.integers(0, 70))
def test_a_slice_drawn_alone_equals_the_slice_of_the_whole(key, count, begin, length):
    whole_normal = normal((begin + length + count,), **key)
    whole_uniform = uniform(begin + length + count, **key)
    assert torch.equal(normal((length,), **key, offset=begin), whole_normal[begin : begin + length])
    assert torch.equal(uniform(length, **key, offset=begin), whole_uniform[begin : begin + length])


def test_slices_equal_the_whole_at_every_vector_length():
    whole = normal((4099,), **KEY)
    for begin, end in ((0, 4099), (1, 4098), (7, 23), (1024, 2048), (2047, 4099)):
        assert torch.equal(normal((end - begin,), **KEY, offset=begin), whole[begin:end])


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 in plain integers, from the paper: the reference for what the docstring promises."""
    mask = 2**64 - 1
    for _ in range(10):
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 64) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


@settings(deadline=None, max_examples=30)
@given(key=keys, number=st.integers(0, 5000))
def test_each_number_is_what_the_documented_formula_gives(key, number):
    stream = int.from_bytes(hashlib.blake2b(key["stream"].encode(), digest_size=8).digest(), "little")
    word_number = number // 2
    block = philox4x64([word_number // 4 + 1, key["position"], key["step"], 0], [key["seed"], stream])
    low, high = block[word_number % 4] & 0xFFFFFFFF, block[word_number % 4] >> 32
    chosen = high if number % 2 else low
    assert uniform(1, **key, offset=number).item() == (chosen >> 8) * 2.0**-24
    radius = math.sqrt(-2 * math.log((low | 1) * 2.0**-32))
    angle = 2 * math.pi * high * 2.0**-32
    expected = radius * (math.sin(angle) if number % 2 else math.cos(angle))
    assert normal((1,), **key, offset=number).item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_other_seeds_streams_positions_and_steps_are_uncorrelated():
    count = 100_000
    variants = [KEY] + [{**KEY, name: value} for name, value in (("seed", 8), ("stream", "time"), ("position", 12))]
    variants += [{**KEY, "step": 4}, {**KEY, "position": 3, "step": 11}, {**KEY, "seed": 11, "position": 7}]
    drawn = [normal((count,), **key).double() for key in variants]
    for first, second in combinations(drawn, 2):
        assert abs((first * second).mean().item()) < 5 / math.sqrt(count)


def test_neighbouring_numbers_are_uncorrelated():
    values = normal((100_000,), **KEY).double()
    for lag in (1, 2, 4, 8, 16):
        assert abs((values[:-lag] * values[lag:]).mean().item()) < 5 / math.sqrt(len(values))


def test_normal_moments_and_distribution():
    count = 1_000_000
    values = normal((count,), **KEY).double()
    assert values.mean().abs() < 5 / math.sqrt(count)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((values**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / count)
    cumulative = torch.special.ndtr(values.sort().values)
    assert (cumulative - torch.arange(1, count + 1) / count).abs().max() < 1.95 / math.sqrt(count)


def test_uniform_distribution_and_bounds():
    count = 1_000_000
    values = uniform(count, **KEY).double().sort().values
    assert values[0] >= 0
    assert values[-1] < 1
    assert (values - torch.arange(1, count + 1) / count).abs().max() < 1.95 / math.sqrt(count)


def test_the_largest_uniform_is_below_one_in_float32():
    largest = np.float32((2**32 - 1) >> 8) * np.float32(2.0**-24)
    assert largest < np.float32(1)
    assert largest == np.nextafter(np.float32(1), np.float32(0))


def test_the_global_generators_are_left_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    normal((8,), **KEY)
    uniform(8, **KEY)
    permutation(8, seed=0, stream="order", step=0)
    assert (torch.rand(1), np.random.rand()) == expected


def test_a_shape_is_filled_in_row_major_order():
    assert torch.equal(normal((3, 4, 5), **KEY).flatten(), normal((60,), **KEY))
    assert normal((3, 4, 5), **KEY).is_contiguous()
    assert normal((0, 4), **KEY).shape == (0, 4)


@settings(deadline=None, max_examples=40)
@given(positions=st.lists(st.integers(0, 2**40), max_size=5), count=st.integers(0, 40), offset=st.integers(0, 40))
def test_many_positions_at_once_are_those_of_each_alone(positions, count, offset):
    key = {"seed": 7, "stream": "noise", "step": 3, "offset": offset}
    together = normals((count, 2), positions=positions, **key)
    assert together.shape == (len(positions), count, 2)
    for row, position in zip(together, positions, strict=True):
        assert torch.equal(row, normal((count, 2), position=position, **key))
