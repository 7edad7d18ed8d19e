"""Quantisation to float8: the reference by its definition and beside torchao, the kernel beside the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headway.kernels import quantise, quantise_both
from headway.kernels.quantise import quantise_matrix
from headway.kernels.quantise_reference import FORMATS, SCALINGS, rounded_up
from ranks import run_ranks
from soak import soak

pytest.importorskip("triton")

from headway.kernels.proof.quantise_cases import CASES, Case, check, kernel, matrix, reference, rounding_error


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("number_format", FORMATS)
def test_codes_stand_for_the_numbers_up_to_half_a_unit(scaling, number_format):
    case = Case(70, 140, scaling, number_format, torch.float32)
    x = matrix(case)
    for transposed in (False, True):
        assert rounding_error(case, x, reference(case, x), transposed=transposed) <= 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_largest_number_under_a_scale_has_the_largest_code(scaling):
    quantised = quantise(matrix(Case(130, 256, scaling, dtype=torch.float32)), scaling)
    sizes = quantised.codes.float().abs()
    if scaling == "mx":  # its scale may be up to twice as large as it needs to be
        assert 224 <= float(sizes.view(130, 8, 32).amax(2).min()) <= float(sizes.max()) <= 448
    elif scaling == "row":
        assert bool((sizes.amax(1) == 448).all())
    else:
        assert float(sizes.max()) == 448


def test_scales_of_mx_are_those_of_torchao():
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    scales, codes = mx.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    quantised = quantise(x, "mx")
    assert torch.equal(quantised.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(quantised.codes.float(), codes.view(40, 96).float())


def test_zeros_have_scale_1_and_powers_of_two_are_rounded_up():
    zeros = quantise(torch.zeros(3, 64), "mx")
    assert zeros.scales.float().tolist() == [[1.0, 1.0]] * 3
    assert not zeros.dequantised("mx").any()
    assert rounded_up(torch.tensor([1.0, 1.0000001, 3.0, 2.0**-126])).tolist() == [1.0, 2.0, 4.0, 2.0**-126]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_makes_no_number_of_all_under_its_scale(scaling, number):
    x = torch.ones(130, 260)
    x[1, 2] = number
    lost = quantise(x, scaling).dequantised(scaling).isnan()
    under = {"tensor": (130, 260), "row": (1, 260), "block_1x128": (1, 128), "block_128x128": (128, 128), "mx": (1, 32)}
    assert bool(lost[1, 2])
    assert int(lost.sum()) == under[scaling][0] * under[scaling][1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_gives_the_bits_of_the_reference(case):
    for verdict in check(case, seed=1):
        assert verdict.passed, verdict


matrices = st.builds(
    Case,
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    scaling=st.sampled_from(SCALINGS),
    number_format=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    both=st.booleans(),
    strided=st.booleans(),
)


@pytest.mark.parametrize("examples", [4, soak(200)])
def test_the_kernel_gives_the_bits_of_the_reference_for_random_shapes(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(case=matrices)
    def holds(case):
        for verdict in check(case):
            assert verdict.passed, (case, verdict)

    holds()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_nothing_is_quantised_to_nothing(shape, scaling):
    case = Case(*shape, scaling)
    x = torch.zeros(shape).bfloat16()
    found, right = kernel(case, x), reference(case, x)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in right.items()}
    assert found["codes"].shape == shape


def test_one_pass_gives_both_layouts_and_leaves_its_input():
    x = matrix(Case(50, 90, "mx"))
    untouched = x.clone()
    once, transposed = quantise_both(x, "mx")
    assert torch.equal(once.codes.float(), quantise(x, "mx").codes.float())
    assert torch.equal(transposed.codes.float(), quantise(x.mT, "mx").codes.float())
    assert transposed.codes.is_contiguous()
    assert torch.equal(x, untouched)


@pytest.mark.parametrize(
    ("x", "scaling", "number_format", "message"),
    [
        (torch.zeros(2, 3, 4), "row", "e4m3", "is not \\[rows, columns\\]"),
        (torch.zeros(2, 3).double(), "row", "e4m3", "float64"),
        (torch.zeros(2, 3), "column", "e4m3", "none of tensor, row"),
        (torch.zeros(2, 3), "row", "e3m4", "none of e4m3, e5m2"),
    ],
)
def test_what_can_not_be_quantised_is_refused(x, scaling, number_format, message):
    with pytest.raises(ValueError, match=message):
        quantise(x, scaling, number_format)


@pytest.mark.parametrize("scaling", ["tensor", "mx"])
def test_torch_finds_the_operator_well_registered(scaling):
    # Not the comparison of compiled outputs: torch compares no float8 tensors.
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(quantise_matrix, (torch.randn(6, 64), 2, scaling, "e4m3"), test_utils=utils)


@pytest.mark.parametrize("layouts", [1, 2])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_fake_tensors_on_a_gpu_have_the_shapes_of_real_ones(scaling, layouts):
    real = quantise_matrix(torch.randn(130, 70), layouts, scaling, "e5m2")
    with FakeTensorMode():
        fake = quantise_matrix(torch.empty(130, 70, device="cuda"), layouts, scaling, "e5m2")
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_a_whole_graph_compiles_around_it():
    x = torch.randn(8, 64)
    compiled = torch.compile(lambda x: quantise(2 * x, "row"), fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(compiled.codes.float(), quantise(2 * x, "row").codes.float())


def split_rows() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    held = []
    for scaling in ("row", "mx", "block_128x128"):
        whole, parts = quantise(x, scaling), quantise(distribute_tensor(x, mesh, [Shard(0)]), scaling)
        split = parts.codes.placements == (Shard(0),)
        here = whole.scales.float().chunk(2)[mesh.get_rank()] if split else whole.scales
        held += [torch.equal(parts.scales.to_local().float(), here)]
        held += [split == (scaling != "block_128x128")]
    return held


def test_rows_of_a_dtensor_are_quantised_where_they_are():
    assert all(all(held) for held in run_ranks(2, split_rows))
