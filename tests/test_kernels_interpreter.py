"""The interpreter has a GPU's numbers, and sees accesses that a GPU would let pass in silence."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from headway.kernels.proof.accuracy import judge
from headway.kernels.proof.interpreter import IllegalAccess, interpreted

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + place, mask=place < count)
    tl.store(target + place, value.to(target.dtype.element_ty), mask=place < count)


@triton.jit
def arithmetic_kernel(a, b, results, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x, y = tl.load(a + place), tl.load(b + place)
    tl.store(results + place, x + y)
    tl.store(results + BLOCK + place, x * y)
    tl.store(results + 2 * BLOCK + place, x - y)
    tl.store(results + 3 * BLOCK + place, tl.where(x < y, -x, y))
    tl.store(results + 4 * BLOCK + place, tl.fma(x, y, x))
    tl.store(results + 5 * BLOCK + place, tl.zeros((BLOCK,), tl.bfloat16) + tl.sum(x, 0))
    tl.store(results + 6 * BLOCK + place, tl.zeros((BLOCK,), tl.bfloat16) + tl.max(x, 0))
    tl.store(results + 7 * BLOCK + place, tl.full((BLOCK,), 1.0, tl.bfloat16) * 0.3)


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y).to(c.dtype.element_ty))


@triton.jit
def count_kernel(values, total, BLOCK: tl.constexpr):
    tl.atomic_add(total + tl.zeros((BLOCK,), tl.int32), tl.load(values + tl.arange(0, BLOCK)))


@triton.jit
def shifted_kernel(source, target, LOADED: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(target + place + STORED, tl.load(source + place + LOADED))


@triton.jit
def racing_kernel(target, READS: tl.constexpr):
    if READS:
        tl.store(target + tl.program_id(0), tl.load(target + (tl.program_id(0) + 1) % 2))
    else:
        tl.store(target, tl.program_id(0))


@triton.jit
def order_kernel(seen, counter):
    tl.store(seen + tl.program_id(0), tl.atomic_add(counter, 1))


def all_bfloat16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def between_and_halfway(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of an 8-bit format, halfway points, what is a little off them, and random numbers."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halfway = (numbers[1:] + numbers[:-1]) / 2
    return torch.cat([numbers, halfway, halfway * (1 + 1e-6), halfway * (1 - 1e-6), torch.randn(2000)])


def copied(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=dtype)
    block = triton.next_power_of_2(source.numel())
    with interpreted():
        copy_kernel[(1,)](source, target, source.numel(), BLOCK=block)
    return target


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan = a.float().isnan()
    bits = torch.uint8 if a.element_size() == 1 else torch.int16
    return torch.equal(nan, b.float().isnan()) and torch.equal(a.view(bits)[~nan], b.view(bits)[~nan])


def test_float32_rounds_to_bfloat16_as_torch_does():
    exact = all_bfloat16().float()
    near = torch.cat([exact, exact * (1 + 2**-9), exact * (1 + 2**-8 + 2**-20), torch.tensor([3.4e38, -3.4e38])])
    assert same_bits(copied(near, torch.bfloat16), near.bfloat16())
    assert same_bits(copied(all_bfloat16(), torch.float32).bfloat16(), all_bfloat16())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float32_rounds_to_float8_as_torch_does_and_saturates(dtype):
    torch.manual_seed(0)
    values = between_and_halfway(dtype)
    assert same_bits(copied(values, dtype), values.to(dtype))
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([1e9, -1e9, torch.inf, -torch.inf])
    assert copied(beyond, dtype).float().tolist() == [largest, -largest, largest, -largest]
    assert copied(torch.tensor([torch.nan]), dtype).float().isnan().all()


def test_bfloat16_arithmetic_rounds_each_operation_once():
    torch.manual_seed(0)
    a, b = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    results = torch.empty(8, 64, dtype=torch.bfloat16)
    with interpreted():
        arithmetic_kernel[(1,)](a, b, results, BLOCK=64)
    fused = (a.double() * b.double() + a.double()).bfloat16()
    expected = [a + b, a * b, a - b, torch.where(a < b, -a, b), fused, a.sum(), a.max(), torch.tensor(0.3).bfloat16()]
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right.expand(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FLOAT8])
def test_products_of_narrow_matrices_are_those_of_their_values(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(16, 32).to(dtype), torch.randn(32, 16).to(dtype)
    c = torch.empty(16, 16)
    with interpreted():
        dot_kernel[(1,)](a, b, c, M=16, N=16, K=32)
    assert torch.allclose(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_atomic_additions_to_one_place_all_count(dtype):
    total = torch.zeros(1, dtype=dtype)
    with interpreted():
        count_kernel[(1,)](torch.arange(16, dtype=dtype), total, BLOCK=16)
    assert total.item() == sum(range(16))


@pytest.mark.parametrize(("loaded", "stored", "does"), [(1, 0, "reads"), (-1, 0, "reads"), (0, 1, "writes")])
def test_an_access_beside_a_tensor_is_refused_even_where_memory_is_ours(loaded, stored, does):
    around = torch.zeros(3, 16)
    with interpreted(), pytest.raises(IllegalAccess, match=f"{does} out of bounds: 1 addresses"):
        shifted_kernel[(1,)](around[1], torch.empty(16), LOADED=loaded, STORED=stored, BLOCK=16)


def test_an_access_between_the_elements_of_a_strided_tensor_is_refused():
    with interpreted(), pytest.raises(IllegalAccess, match="reads out of bounds"):
        shifted_kernel[(1,)](torch.zeros(16, 2)[:, 0], torch.empty(16), LOADED=0, STORED=0, BLOCK=16)


@pytest.mark.parametrize("reads", [False, True])
def test_programs_that_race_are_refused(reads):
    with interpreted(), pytest.raises(IllegalAccess, match="what another program"):
        racing_kernel[(2,)](torch.zeros(2, dtype=torch.int32), READS=reads)


def test_programs_run_in_the_order_of_a_seed():
    def order(seed: int | None) -> list[int]:
        seen, counter = torch.zeros(20, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with interpreted(seed):
            order_kernel[(20,)](seen, counter)
        return seen.tolist()

    assert order(None) == list(range(20))
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20))


def test_what_is_left_unwritten_is_nan_and_the_language_is_whole_again_afterwards():
    with interpreted():
        assert torch.empty(4).isnan().all()
    with pytest.raises(RuntimeError, match=r"0 active drivers"):
        copy_kernel[(1,)](torch.zeros(1), torch.zeros(1), 1, BLOCK=1)


@pytest.mark.parametrize("fault", ["one element", "all a little", "nan lost"])
def test_a_verdict_finds_what_is_less_exact_than_eager(fault):
    torch.manual_seed(0)
    exact = torch.randn(1000, dtype=torch.float64)
    exact[0] = torch.nan
    eager = exact.float()
    result = eager.clone()
    assert judge("right", result, eager, exact).passed
    if fault == "one element":
        result[7] += 1e-5
    elif fault == "all a little":
        result = torch.from_numpy(np.nextafter(result.numpy(), np.float32(9)))
    else:
        result[0] = 1.0
    assert not judge("wrong", result, eager, exact).passed
