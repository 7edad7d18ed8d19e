"""Machine code of the kernels keeps what is promised, and what reads it sees what breaks a promise."""

import dataclasses

import pytest

from soak import soak

pytest.importorskip("triton")

import triton
import triton.language as tl

from headway.kernels.proof import adaln_cases, adamw_cases, quantise_cases
from headway.kernels.proof.machine_code import TARGETS, Compiled, broken, facts


@triton.jit
def narrow_kernel(source, target, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    value = tl.load(source + place)
    tl.store(target + place, value * value)


@triton.jit
def wide_row_kernel(source, target, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * stride + tl.arange(0, BLOCK)
    value = tl.load(source + place).to(tl.float32)
    value = value - tl.sum(value, 0) / BLOCK
    tl.store(target + place, (value / tl.sum(value * value, 0)).to(target.dtype.element_ty))


def bad(kernel, block: int, *odd: str) -> Compiled:
    pointers = {"source": "*bf16", "target": "*bf16"}
    return Compiled("bad", kernel, pointers, {"stride": "i32"}, {"BLOCK": block}, 4, frozenset(odd))


ADALN = {compiled.name: compiled for compiled in adaln_cases.compiled()}
QUICK = [name for name in ADALN if "8192" in name]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name if name in QUICK else soak(name) for name in ADALN])
def test_adaln_keeps_every_promise(name, target):
    found = facts(ADALN[name], target)
    assert broken(ADALN[name], found, target) == []
    assert found.registers <= 255


ADAMW = {compiled.name: compiled for compiled in adamw_cases.compiled()}


@pytest.mark.parametrize("name", ADAMW)
@pytest.mark.parametrize("target", ["sm_90", *map(soak, sorted(TARGETS.keys() - {"sm_90"}))])
def test_adamw_keeps_every_promise(name, target):
    assert broken(ADAMW[name], facts(ADAMW[name], target), target) == []


QUANTISE = {compiled.name: compiled for compiled in quantise_cases.compiled()}


@pytest.mark.parametrize("target", ["sm_90", soak("sm_100"), soak("gfx942")])
@pytest.mark.parametrize("name", [name if "mx" in name else soak(name) for name in QUANTISE])
def test_quantise_keeps_every_promise(name, target):
    assert broken(QUANTISE[name], facts(QUANTISE[name], target), target) == []


@pytest.mark.parametrize("name", QUICK)
def test_sizes_of_one_which_triton_takes_for_constants_compile_too(name):
    compiled = ADALN[name]
    ones = {size: 1 for size in compiled.scalars if size in adaln_cases.COUNTS}
    scalars = {size: kind for size, kind in compiled.scalars.items() if size not in ones}
    single = dataclasses.replace(compiled, scalars=scalars, constants=compiled.constants | ones, odd=frozenset())
    found = facts(single, "sm_90")
    assert (found.spills, found.narrow_arithmetic, found.short_offsets) == (0, (), ())


def test_bfloat16_arithmetic_and_short_offsets_are_seen():
    found = facts(bad(narrow_kernel, 1024), "sm_90")
    assert any("arith.mulf" in line for line in found.narrow_arithmetic)
    assert found.short_offsets
    assert len(broken(bad(narrow_kernel, 1024), found, "sm_90")) == 2


def test_a_row_that_does_not_fit_registers_is_seen_to_spill():
    found = facts(bad(wide_row_kernel, 32768), "sm_90")
    assert found.spills > 20
    assert found.narrow_arithmetic == found.short_offsets == ()


def test_a_stride_that_16_does_not_divide_is_seen_in_the_loads():
    found = facts(bad(wide_row_kernel, 1024, "stride"), "sm_90")
    assert found.vector_loads == 0
    assert "loads under 16 bytes" in broken(bad(wide_row_kernel, 1024, "stride"), found, "sm_90")[0]


def test_a_promise_of_shared_memory_is_held_to_the_target():
    compiled = bad(wide_row_kernel, 1024)
    found = dataclasses.replace(facts(compiled, "sm_90"), shared_memory=200 * 1024)
    assert broken(compiled, found, "sm_90") == []
    assert "shared memory" in broken(compiled, found, "sm_80")[0]
