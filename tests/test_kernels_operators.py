"""Operators on rows: kernels and reference against float64, and the operators within autograd, compile and layouts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headway.kernels import glu, glu_packed, norm_rope, rms_norm
from headway.kernels.glu import glu_forward, glu_packed_forward
from headway.kernels.norm_rope import norm_rope_forward
from headway.kernels.rms_norm import rms_norm_forward
from ranks import run_ranks
from soak import soak

pytest.importorskip("triton")

from headway.kernels.proof import glu_cases, machine_code, norm_rope_cases, rms_norm_cases
from headway.kernels.proof.machine_code import TARGETS, broken, facts


@dataclass(frozen=True)
class Operator:
    """What the tests need of one: its proof, its public function, and cases of it."""

    proof: Any
    public: Callable[[Any, dict[str, Tensor]], list[Tensor]]
    """(case, inputs by name) -> its results, in the order of the proof's RESULTS."""
    registered: Callable[[Any, Any], tuple[Any, ...]]
    """(case, inputs) -> the registered operator and what it is given."""
    small: tuple[Any, ...]
    """Cases in float64, of which the first has everything."""
    shapes: Any
    """A strategy of random cases."""
    whole: frozenset[str]
    """Inputs that all ranks have whole."""
    splits: Callable[[Any], tuple[int, ...]]
    """case -> dimensions over which ranks may share it."""
    quick: str
    """Part of the names of what the suite compiles; make soak compiles all."""


def _rms_norm(case: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
    results = rms_norm(**tensors, epsilon=rms_norm_cases.EPSILON, offset=case.offset)
    return list(results if case.added else results[1:])


def _glu(case: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
    if case.packed:
        return [glu_packed(**tensors, activation=case.activation, gate_first=case.gate_first)]
    return [glu(**tensors, activation=case.activation)]


def _norm_rope(case: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
    return [norm_rope(**tensors, pairs=case.pairs, epsilon=norm_rope_cases.EPSILON)]


DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
Norm = rms_norm_cases.Case
Glu = glu_cases.Case
Rope = norm_rope_cases.Case
OPERATORS = {
    "rms_norm": Operator(
        rms_norm_cases,
        _rms_norm,
        lambda case, given: (
            rms_norm_forward,
            (given.x, given.branch, given.weight, rms_norm_cases.EPSILON, case.offset),
        ),
        (Norm(2, 4, 6, torch.float64, offset=1.0, strided=True), Norm(2, 4, 6, torch.float64, added=False)),
        st.builds(
            Norm,
            samples=st.integers(1, 2),
            tokens=st.integers(1, 6),
            width=st.integers(9, 300),
            dtype=DTYPES,
            added=st.booleans(),
            offset=st.sampled_from([0.0, 1.0]),
            strided=st.booleans(),
            programs=st.integers(1, 12),
        ),
        frozenset({"weight"}),
        lambda case: (0, 1),
        "8192",
    ),
    "glu": Operator(
        glu_cases,
        _glu,
        lambda case, given: (
            (glu_packed_forward, (given.packed, case.activation, case.gate_first))
            if case.packed
            else (glu_forward, (given.gate, given.value, case.activation))
        ),
        (
            Glu(2, 4, 6, torch.float64, "gelu", packed=True, gate_first=False),
            Glu(2, 4, 6, torch.float64, "silu", strided=True),
            Glu(2, 4, 6, torch.float64, "gelu_tanh", packed=True),
        ),
        st.builds(
            Glu,
            samples=st.integers(1, 2),
            tokens=st.integers(1, 4),
            width=st.integers(1, 3000),
            dtype=DTYPES,
            activation=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
            packed=st.booleans(),
            gate_first=st.booleans(),
            strided=st.booleans(),
        ),
        frozenset(),
        lambda case: (0, 1) if case.packed else (0, 1, 2),
        "silu",
    ),
    "norm_rope": Operator(
        norm_rope_cases,
        _norm_rope,
        lambda case, given: (
            norm_rope_forward,
            (
                *(given.x, given.then, given.weight, given.then_weight, given.cos, given.sin),
                *(case.pairs == "interleaved", case.norm == "across", norm_rope_cases.EPSILON),
            ),
        ),
        (
            Rope(2, 4, 2, 8, torch.float64, then=2, pairs="interleaved", strided=True),
            Rope(2, 4, 2, 8, torch.float64, norm="across", rotated=2),
            Rope(2, 4, 2, 8, torch.float64, norm="none", by_sample=True),
            Rope(2, 4, 2, 8, torch.float64, then=4, rotated=0),
        ),
        st.builds(
            Rope,
            samples=st.integers(1, 2),
            tokens=st.integers(1, 4),
            heads=st.integers(1, 5),
            channels=st.integers(5, 24).map(lambda n: 2 * n),
            dtype=DTYPES,
            then=st.integers(0, 3),
            norm=st.sampled_from(["head", "across", "none"]),
            pairs=st.sampled_from(["half", "interleaved"]),
            rotated=st.sampled_from([None, 0, 1, 3]),
            by_sample=st.booleans(),
            strided=st.booleans(),
            programs=st.integers(1, 12),
        ),
        frozenset({"weight", "then_weight", "cos", "sin"}),
        lambda case: (0, *([] if case.then else [1]), *([] if case.norm == "across" else [2])),
        "across",
    ),
}


def inputs_of(given: Any) -> dict[str, Tensor]:
    """What forward is given, by name."""
    return {n: t for n, t in vars(given).items() if t is not None and not n.startswith("grad_")}


TABLES = ("cos", "sin")
"""Inputs without a gradient."""


def leaves_of(given: Any) -> dict[str, Tensor]:
    """Inputs as leaves of their own."""
    return {n: t.detach().requires_grad_(n not in TABLES) for n, t in inputs_of(given).items()}


def differentiated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that have a gradient."""
    return {name: tensor for name, tensor in tensors.items() if name not in TABLES}


def gradients_of(given: Any) -> list[Tensor]:
    """What backward is given."""
    return [t for n, t in vars(given).items() if t is not None and n.startswith("grad_")]


def through_operator(operator: Operator, case: Any, given: Any, call: Any = None) -> dict[str, Tensor]:
    """As the proof's ``eager``, by the public function."""
    leaves = leaves_of(given)
    results = (call or operator.public)(case, leaves)
    leaves = differentiated(leaves)
    gradients = torch.autograd.grad(results, list(leaves.values()), gradients_of(given))
    names = operator.proof.eager(given, case).keys()
    if len(names) < len(results) + len(gradients):  # of a residual's two summands the gradient is one
        gradients = [g for name, g in zip(leaves, gradients, strict=True) if name != "branch"]
    return dict(zip(names, [*(result.detach() for result in results), *gradients], strict=True))


CASES = [(name, case) for name, operator in OPERATORS.items() for case in operator.proof.CASES]
SMALL = [(name, case) for name, operator in OPERATORS.items() for case in operator.small]


@pytest.mark.parametrize(("name", "case"), SMALL, ids=str)
def test_the_operator_on_a_cpu_is_what_torch_computes_in_float64(name, case):
    operator = OPERATORS[name]
    made = operator.proof.inputs(case)
    right = operator.proof.eager(made, case)
    for result, value in through_operator(operator, case, made).items():
        torch.testing.assert_close(value, right[result], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_kernels_are_as_exact_as_eager(name, case):
    for verdict in OPERATORS[name].proof.check(case, seed=1):
        assert verdict.passed, verdict


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("examples", [5, soak(200)])
def test_kernels_are_as_exact_as_eager_for_random_shapes(name, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(case=OPERATORS[name].shapes)
    def holds(case):
        for verdict in OPERATORS[name].proof.check(case):
            assert verdict.passed, (case, verdict)

    holds()


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_same_bits_in_any_order_of_programs(name):
    proof = OPERATORS[name].proof
    case = replace(OPERATORS[name].small[0], dtype=torch.float32)
    first, *others = (proof.kernel(proof.inputs(case), case, order) for order in (None, 1, 2))
    for other in others:
        assert all(torch.equal(first[result], other[result]) for result in first)


@pytest.mark.parametrize("name", OPERATORS)
def test_inputs_are_not_written_to(name):
    operator = OPERATORS[name]
    case = replace(operator.small[0], dtype=torch.float32)
    made, untouched = operator.proof.inputs(case), operator.proof.inputs(case)
    operator.proof.kernel(made, case)
    through_operator(operator, case, made)
    for tensor, same in zip(vars(made).values(), vars(untouched).values(), strict=True):
        assert tensor is None or torch.equal(tensor, same)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_tokens_give_empty_results_and_gradients_of_zero(name):
    operator = OPERATORS[name]
    case = replace(operator.small[1], dtype=torch.float32, tokens=0)
    made = operator.proof.inputs(case)
    right = operator.proof.eager(made, case)
    for results in (operator.proof.kernel(made, case), through_operator(operator, case, made)):
        for result, value in results.items():
            assert value.shape == right[result].shape
            assert not value.any()


@pytest.mark.parametrize(("name", "case"), SMALL, ids=str)
def test_torch_finds_the_operator_well_registered(name, case):
    operator = OPERATORS[name]
    made = operator.proof.inputs(case)
    for tensor in differentiated(inputs_of(made)).values():
        tensor.requires_grad_()
    torch.library.opcheck(*operator.registered(case, made))


@pytest.mark.parametrize(("name", "case"), SMALL, ids=str)
def test_a_whole_graph_compiles_around_it(name, case):
    operator = OPERATORS[name]
    made = operator.proof.inputs(case)
    compiled = torch.compile(operator.public, fullgraph=True, backend="aot_eager")
    right = through_operator(operator, case, made)
    for result, value in through_operator(operator, case, made, compiled).items():
        assert torch.equal(value, right[result]), result


@pytest.mark.parametrize(("name", "case"), SMALL, ids=str)
def test_fake_tensors_on_a_gpu_need_none(name, case):
    operator = OPERATORS[name]
    case = replace(case, dtype=torch.bfloat16)
    made = operator.proof.inputs(case)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {n: torch.empty(t.shape, dtype=t.dtype, device="cuda") for n, t in inputs_of(made).items()}
        results = operator.public(case, fakes)
    for result, right in zip(results, operator.proof.eager(made, case).values(), strict=False):
        assert (result.device.type, result.shape, result.dtype) == ("cuda", right.shape, right.dtype)


def distributed(name: str) -> list[tuple[str, bool]]:
    """For splits of samples and tokens: whether results keep the split, and gradients are those of one device."""
    operator = OPERATORS[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = []
    for case in operator.small:
        for split in operator.splits(case):
            made = operator.proof.inputs(case)
            right = operator.proof.eager(made, case)
            leaves = {
                n: distribute_tensor(t.contiguous(), mesh, [Replicate() if n in operator.whole else Shard(split)])
                for n, t in inputs_of(made).items()
            }
            for tensor in differentiated(leaves).values():
                tensor.requires_grad_()
            results = operator.public(case, leaves)
            leaves = differentiated(leaves)
            upstream = [distribute_tensor(t.contiguous(), mesh, [Shard(split)]) for t in gradients_of(made)]
            gradients = torch.autograd.grad(results, list(leaves.values()), upstream)
            held += [(f"{case} {split}", result.placements == (Shard(split),)) for result in results]
            found = dict(zip((f"grad_{n}" for n in leaves), gradients, strict=True))
            found |= dict(zip(right, results, strict=False))
            for result, value in right.items():
                assert isinstance(found[result], DTensor)
                held.append((f"{case} {split} {result}", torch.allclose(found[result].full_tensor(), value)))
    return held


@pytest.mark.parametrize("name", OPERATORS)
def test_dtensors_keep_their_split_and_give_the_gradients_of_one_device(name):
    for held in run_ranks(2, distributed, name):
        assert [what for what, right in held if not right] == []
        assert len(held) >= 8


COMPILED = {
    (name, compiled.name): compiled for name, operator in OPERATORS.items() for compiled in operator.proof.compiled()
}


@pytest.mark.parametrize(
    "key", [key if OPERATORS[key[0]].quick in key[1] else soak(key) for key in COMPILED], ids=lambda key: key[1]
)
@pytest.mark.parametrize("target", ["sm_90", *map(soak, sorted(TARGETS.keys() - {"sm_90"}))])
def test_machine_code_keeps_every_promise(key, target):
    found = facts(COMPILED[key], target)
    assert broken(COMPILED[key], found, target) == []
    assert found.registers <= (255 if machine_code.TARGETS[target].backend == "cuda" else 512)
