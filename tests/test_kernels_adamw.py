"""AdamW with stochastic rounding: its random numbers, the kernel beside the reference, the operator within torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.kernels import Average, Rounding, adamw_, key_of, place_of
from headway.kernels.adamw import adamw_update
from headway.kernels.stochastic_rounding import philox, random_bits, round_stochastically

KEY = key_of(7, "rounding", "0.weight")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random_words_are_the_known_answers_of_random123(counter, key, words):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox(c0, c1, c2, c3, key[1] << 32 | key[0])) == words


@st.composite
def boxes(draw):
    """A whole shape of up to four dimensions and a box in it that is cut in three of them or fewer."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    cut = draw(st.sets(st.integers(0, len(shape) - 1), max_size=3))
    first = [draw(st.integers(0, n - 1)) if d in cut else 0 for d, n in enumerate(shape)]
    length = [draw(st.integers(1, n - f)) if d in cut else n for d, (n, f) in enumerate(zip(shape, first, strict=True))]
    return shape, first, length


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(box=boxes())
def test_a_shard_has_the_random_numbers_of_its_elements_in_the_whole(box):
    shape, first, length = box
    every = random_bits(place_of(shape, [0] * len(shape), shape), math.prod(shape), key=KEY, step=3).view(shape)
    index = tuple(slice(f, f + n) for f, n in zip(first, length, strict=True))
    part = random_bits(place_of(shape, first, length), math.prod(length), key=KEY, step=3)
    assert torch.equal(part, every[index].flatten())


def test_a_box_cut_in_four_dimensions_is_refused():
    with pytest.raises(ValueError, match="more than 3"):
        place_of((4, 4, 4, 4), (1, 1, 1, 1), (2, 2, 2, 2))


def test_numbers_are_uniform_and_differ_by_step_parameter_and_seed():
    place = place_of((65536,), (0,), (65536,))
    drawn = [
        random_bits(place, 65536, key=key, step=step)
        for key, step in ((KEY, 0), (KEY, 1), (key_of(8, "rounding", "0.weight"), 0), (key_of(7, "rounding", "1"), 0))
    ]
    for number, bits in enumerate(drawn):
        counts = torch.bincount(bits >> 8, minlength=256).double()
        assert float(((counts - 256).square() / 256).sum()) < 330.5  # χ² of 255 degrees, one in a thousand above
        assert all(float((bits == other).float().mean()) < 1e-3 for other in drawn[:number])


def test_rounding_is_to_a_neighbour_with_the_value_as_its_mean():
    values = torch.tensor([1.001, -3.3e-5, 1e30, 0.1, -7.77])
    draws = 2**16
    bits = torch.arange(draws, dtype=torch.int32).repeat(len(values), 1)  # each number once: the mean is exact
    rounded = round_stochastically(values[:, None].expand(-1, draws), bits).double()
    torch.testing.assert_close(rounded.mean(1), values.double(), rtol=1e-9, atol=0.0)
    for value, found in zip(values, rounded, strict=True):
        below, above = sorted(found.unique().tolist())
        assert below < float(value) < above
        assert above - below <= 2**-7 * abs(float(value))


def test_what_bfloat16_has_and_what_is_not_finite_stays():
    numbers = torch.tensor([0.0, -0.0, 1.5, -(2.0**-130), torch.inf, -torch.inf, torch.nan])
    for bits in (0, 2**16 - 1):
        rounded = round_stochastically(numbers, torch.full((7,), bits, dtype=torch.int32))
        torch.testing.assert_close(rounded, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)


def tensors(dtype: torch.dtype, seed: int = 0) -> dict[str, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(5, 6), (7,), (3, 2, 4)]
    weights = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "weights": weights,
        "gradients": [torch.randn(shape, generator=random).to(dtype) for shape in shapes],
        "exp_avgs": [torch.zeros(shape, dtype=wide) for shape in shapes],
        "exp_avg_sqs": [torch.zeros(shape, dtype=wide) for shape in shapes],
    }


def update(given: dict[str, list[torch.Tensor]], updates: int, *, averages=(), rounding=None, scale=0.5) -> None:
    adamw_(
        **given,
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decays=[0.1, 0.0, 0.1],
        updates=updates,
        scale=torch.tensor(scale),
        averages=list(averages),
        rounding=rounding,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_torchs_adamw(dtype):
    given, right = tensors(dtype), tensors(dtype)
    average = [weight.clone() for weight in right["weights"]]
    expected = [weight.clone() for weight in right["weights"]]
    for updates in range(1, 4):
        update(given, updates, averages=[Average(average, 0.25)])
    parameters = [torch.nn.Parameter(weight) for weight in right["weights"]]
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1:2], "weight_decay": 0.0}]
    exact = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for _ in range(3):
        for parameter, gradient in zip(parameters, right["gradients"], strict=True):
            parameter.grad = 0.5 * gradient
        exact.step()
        for mean, parameter in zip(expected, parameters, strict=True):
            mean.mul_(0.75).add_(0.25 * parameter.detach())
    torch.testing.assert_close(given["weights"], [parameter.detach() for parameter in parameters])
    torch.testing.assert_close(average, expected)


def rounding_of(weights: list[torch.Tensor], step: int) -> Rounding:
    places = [place_of(weight.shape, (0,) * weight.ndim, weight.shape) for weight in weights]
    return Rounding(places, [key_of(0, "test", str(number)) for number in range(len(weights))], step)


def test_a_rounded_update_is_a_neighbour_of_the_float32_one_and_averages_follow_it():
    given = tensors(torch.bfloat16)
    exact = {name: [t.float() for t in values] for name, values in tensors(torch.bfloat16).items()}
    average = [weight.float() for weight in given["weights"]]
    begun = [tensor.clone() for tensor in average]
    update(given, 1, averages=[Average(average, 0.5)], rounding=rounding_of(given["weights"], 0))
    update(exact, 1)
    for number, (found, right) in enumerate(zip(given["weights"], exact["weights"], strict=True)):
        assert bool(((found.float() - right).abs() <= 2**-7 * right.abs()).all())
        assert bool((found != right.bfloat16()).any())  # not merely to nearest
        torch.testing.assert_close(average[number], (begun[number] + found.float()) / 2)


def test_updates_too_small_for_bfloat16_are_lost_to_nearest_and_kept_at_random():
    steps, rows = 400, 256
    weights, exact = torch.ones(rows, 16).bfloat16(), 1.0
    lost = weights.clone()
    for step in range(steps):
        for rounded in (weights, lost):
            given = {
                "weights": [rounded],
                "gradients": [torch.ones(rows, 16).bfloat16()],
                "exp_avgs": [torch.ones(rows, 16)],
                "exp_avg_sqs": [torch.ones(rows, 16)],
            }
            adamw_(
                **given,
                lr=1e-5,
                betas=(0.0, 0.0),
                eps=0.0,
                weight_decays=[0.0],
                updates=1,
                scale=torch.tensor(1.0),
                rounding=rounding_of([rounded], step) if rounded is weights else None,
            )
        exact -= 1e-5
    assert torch.equal(lost, torch.ones_like(lost))
    # Each step moves an element by 2⁻⁸ with probability 1e-5 · 2⁸: a binomial of steps · elements tries.
    deviation = 2**-8 * math.sqrt(steps * 1e-5 * 2**8 / weights.numel())
    assert abs(float(weights.double().mean()) - exact) < 4 * deviation


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gradients": [torch.zeros(2)] * 3}, "gradients have not the shapes"),
        ({"weights": [torch.zeros(5, 6), torch.zeros(7).double(), torch.zeros(3, 2, 4)]}, "several dtypes"),
        ({"exp_avgs": [torch.zeros(6, 5).mT, torch.zeros(7), torch.zeros(3, 2, 4)]}, "exp_avgs are not all contiguous"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        update(tensors(torch.float32) | changed, 1)


def test_only_bfloat16_is_rounded_at_random():
    given = tensors(torch.float32)
    with pytest.raises(ValueError, match="only bfloat16"):
        update(given, 1, rounding=rounding_of(given["weights"], 0))


def operands() -> tuple:
    given = tensors(torch.bfloat16)
    rounding = rounding_of(given["weights"], 4)
    places = [number for place in rounding.places for number in vars(place).values()]
    averages = [weight.float() for weight in given["weights"]]
    scale = torch.ones(())
    numbers = ([1.0] * 3, [0.1], 0.01, 0.9, 0.95, 1e-8, 0.5)
    return (*given.values(), averages, scale, *numbers, places, rounding.keys, rounding.step)


def test_torch_finds_the_operator_well_registered():
    torch.library.opcheck(adamw_update, operands())


def test_a_whole_graph_compiles_around_it():
    eager, compiled = operands(), operands()
    adamw_update(*eager)
    torch.compile(adamw_update, fullgraph=True, backend="aot_eager")(*compiled)
    for kind in (0, 2, 3, 4):
        assert all(torch.equal(a, b) for a, b in zip(eager[kind], compiled[kind], strict=True))


def test_fake_tensors_on_a_gpu_need_none():
    given = operands()
    with FakeTensorMode(allow_non_fake_inputs=True):
        lists = [[torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in tensors] for tensors in given[:5]]
        assert adamw_update(*lists, torch.empty((), device="cuda"), *given[6:]) is None


def test_gradients_and_scale_are_not_written_to():
    given, before = operands(), operands()
    adamw_update(*given)
    assert all(torch.equal(a, b) for a, b in zip(given[1], before[1], strict=True))
    assert float(given[5]) == 1.0


triton = pytest.importorskip("triton")


def cases():
    from headway.kernels.proof.adamw_cases import CASES

    return CASES


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_kernel_is_as_exact_as_the_reference(case):
    from headway.kernels.proof.adamw_cases import check

    for verdict in check(case, seed=1):
        assert verdict.passed, verdict


def test_the_kernel_rounds_with_the_bits_of_the_reference_in_any_order_of_programs():
    from headway.kernels import adamw_reference
    from headway.kernels.proof.adamw_cases import Case, inputs, kernel, updated, whole

    case = Case((whole(40, 128), ((9, 20), (4, 3), (5, 16)), whole(21)))
    given = inputs(case)
    expected = updated(adamw_reference, given.to())
    for order in (None, 1):
        found = kernel(given.to(), order)
        assert torch.equal(found["weights"], expected["weights"])
    other = updated(adamw_reference, given.to(), step=6)
    assert not torch.equal(other["weights"], expected["weights"])
