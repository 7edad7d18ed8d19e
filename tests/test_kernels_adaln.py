"""adaLN: the reference and the kernels against float64, and the operator within autograd, compile and layouts."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.kernels import adaln, adaln_reference
from headway.kernels.adaln import adaln_backward, adaln_forward
from ranks import run_ranks
from soak import soak

pytest.importorskip("triton")

from headway.kernels.proof import adaln_cases
from headway.kernels.proof.adaln_cases import CASES, Case, Inputs, check, eager, inputs, kernel, results_of

EPSILON = 1e-6
RESIDUALS = ("gated", "added", "none")
float64 = torch.float64


def through_operator(given: Inputs, norm: str = "layer") -> dict[str, torch.Tensor]:
    """As ``eager``, by the operator on the CPU."""
    leaves = {name: getattr(given, name).detach().requires_grad_() for name in arguments_of(given)}
    hidden, output = adaln(**leaves, norm=norm, epsilon=EPSILON)
    added = given.branch is not None
    results = [hidden, output] if added else [output]
    upstream = [given.grad_hidden, given.grad_output] if added else [given.grad_output]
    gradients = torch.autograd.grad(results, list(leaves.values()), upstream)
    values = [*(result.detach() for result in results), *gradients]
    return dict(zip(results_of(given), values, strict=True))


def arguments_of(given: Inputs) -> list[str]:
    """Names of the tensors that forward is given."""
    return [name for name in ("x", "branch", "gate", "scale", "shift") if getattr(given, name) is not None]


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_the_operator_on_a_cpu_is_what_torch_computes_in_float64(norm, residual, rows):
    made = inputs(Case(2, 6, rows, 20, float64, norm, residual, strided=True))
    right = eager(made, norm, EPSILON)
    for name, value in through_operator(made, norm).items():
        torch.testing.assert_close(value, right[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_as_exact_as_eager(case):
    for verdict in check(case, seed=1):
        assert verdict.passed, verdict


shapes = st.builds(
    Case,
    samples=st.integers(1, 2),
    tokens=st.just(6),
    rows=st.sampled_from([1, 2, 3, 6]),
    width=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    norm=st.sampled_from(["layer", "rms"]),
    residual=st.sampled_from(RESIDUALS),
    strided=st.booleans(),
    programs=st.integers(1, 12),
)


@pytest.mark.parametrize("examples", [5, soak(300)])
def test_kernels_are_as_exact_as_eager_for_random_shapes(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(case=shapes)
    def holds(case):
        # The gradient of a norm of few columns is all cancellation: there only the accesses are held.
        if case.width > 8:
            for verdict in check(case):
                assert verdict.passed, (case, verdict)
        else:
            kernel(inputs(case), case, EPSILON)

    holds()


@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_have_the_same_bits_in_any_order_of_programs(rows):
    case = Case(2, 6, rows, 40, torch.float32)
    first, *others = (kernel(inputs(case), case, EPSILON, order) for order in (None, 1, 2))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("used", [0, 1])
def test_of_two_results_one_may_be_used_alone(used):
    made = inputs(Case(1, 4, 2, 6, float64))
    names = ("x", "branch", "gate", "scale", "shift")
    leaves = {name: getattr(made, name).clone().requires_grad_() for name in names}
    alone = torch.autograd.grad(adaln(**leaves)[used], list(leaves.values()), made.grad_output)
    unused = torch.zeros_like(made.x)
    upstream = [unused, made.grad_output] if used else [made.grad_output, unused]
    both = torch.autograd.grad(adaln(**leaves), list(leaves.values()), upstream)
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))


def test_inputs_are_not_written_to():
    case = Case(1, 4, 2, 24, strided=True)
    made, untouched = inputs(case), inputs(case)
    kernel(made, case, EPSILON)
    through_operator(made)
    for name, tensor in made.__dict__.items():
        assert torch.equal(tensor, untouched.__dict__[name]), name


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_token(number):
    case = Case(1, 3, 3, 20, torch.float32)
    made = inputs(case)
    made.x[0, 1, 7] = number
    for results in (kernel(made, case, EPSILON), through_operator(made)):
        assert not results["output"][0, 1].isfinite().any()
        assert not results["grad_x"][0, 1].isfinite().any()
        for name, value in results.items():
            assert value[0, [0, 2]].isfinite().all(), name
        assert results["grad_shift"].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8)])
def test_no_tokens_give_empty_results_and_gradients_of_zero(shape):
    case = Case(*shape[:2], 1, shape[2], torch.float32)
    made = inputs(case)
    for results in (kernel(made, case, EPSILON), through_operator(made)):
        assert results["output"].shape == results["grad_x"].shape == shape
        assert results["grad_scale"].shape == results["grad_gate"].shape == (shape[0], 1, shape[2])
        assert not results["grad_scale"].any()


def test_columns_that_do_not_lie_beside_each_other_and_broadcast_tokens_are_read_right():
    case = Case(2, 4, 2, 12, torch.float32)
    made = inputs(case)
    odd = Inputs(
        made.x.mT.contiguous().mT,
        made.branch[:, :1].expand_as(made.x),
        made.gate.mT.contiguous().mT,
        made.scale[:, :, ::2].repeat_interleave(2, 2)[:, :, :12],
        made.shift.flip(1),
        made.grad_hidden[:1, :1, :1].expand_as(made.x),
        made.grad_output.transpose(0, 1).contiguous().transpose(0, 1),
    )
    right = eager(odd.to(float64), "layer", EPSILON)
    for name, value in kernel(odd, case, EPSILON).items():
        torch.testing.assert_close(value, right[name].float(), rtol=1e-5, atol=1e-5)


def test_float32_parameters_of_bfloat16_tokens_keep_their_precision():
    case = Case(1, 4, 1, 32)
    made = inputs(case)
    wide = {name: getattr(made, name).float() * (1 + 2**-12) for name in ("gate", "scale", "shift")}
    mixed = Inputs(**(made.__dict__ | wide))
    exact = eager(mixed.to(float64), "layer", EPSILON)
    for results in (kernel(mixed, case, EPSILON), through_operator(mixed)):
        assert results["grad_scale"].dtype == torch.float32
        torch.testing.assert_close(results["grad_shift"], exact["grad_shift"].float(), rtol=1e-6, atol=1e-6)
        assert results["output"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm": "batch"}, "neither 'layer' nor 'rms'"),
        ({"branch": None}, "a gate and no branch"),
        ({"branch": torch.zeros(1, 4, 7)}, "has its shape"),
        ({"shift": torch.zeros(1, 2, 8, dtype=float64)}, "shift torch.float64"),
        ({"gate": torch.zeros(1, 1, 8)}, "gate"),
        ({"scale": torch.zeros(1, 3, 8), "shift": torch.zeros(1, 3, 8), "gate": torch.zeros(1, 3, 8)}, "do not divide"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(changed, message):
    tensors = {"x": torch.zeros(1, 4, 8), "branch": torch.zeros(1, 4, 8)}
    tensors |= {name: torch.zeros(1, 2, 8) for name in ("gate", "scale", "shift")}
    with pytest.raises(ValueError, match=message):
        adaln(**(tensors | changed))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_torch_finds_the_operator_well_registered(residual):
    made = inputs(Case(1, 4, 2, 6, float64, residual=residual))
    arguments = [
        None if t is None else t.requires_grad_() for t in (made.x, made.branch, made.gate, made.scale, made.shift)
    ]
    torch.library.opcheck(adaln_forward, (*arguments, "layer", EPSILON))


def test_a_whole_graph_compiles_around_it():
    made = inputs(Case(1, 4, 2, 6, torch.float32))
    names = ("x", "branch", "gate", "scale", "shift")
    leaves = {name: getattr(made, name).clone().requires_grad_() for name in names}
    results = torch.compile(adaln, fullgraph=True, backend="aot_eager")(**leaves, epsilon=EPSILON)
    gradients = torch.autograd.grad(results, list(leaves.values()), [made.grad_hidden, made.grad_output])
    for value, (name, right) in zip((*results, *gradients), through_operator(made).items(), strict=True):
        assert torch.equal(value, right), name


@pytest.mark.parametrize("residual", RESIDUALS)
def test_fake_tensors_on_a_gpu_need_none(residual):
    """Autograd on such tensors asks the device for a stream, so forward and backward are called one by one."""
    given = inputs(Case(2, 6, 3, 8, residual=residual))
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = Inputs(
            *(t if t is None else torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in vars(given).values())
        )
        hidden, output, mean, rstd = adaln_forward(*list(vars(made).values())[:5], "layer", EPSILON)
        kept = made.x if made.branch is None else hidden
        gated = None if made.gate is None else made.branch
        gradients = adaln_backward(
            made.grad_hidden, made.grad_output, kept, gated, made.gate, made.scale, mean, rstd, "layer"
        )
    assert mean.dtype == rstd.dtype == torch.float32
    results = dict(zip(adaln_cases.RESULTS, (hidden, output, *gradients), strict=True))
    for name, value in eager(given, "layer", EPSILON).items():
        if name == "grad_branch" and residual == "added":
            continue
        assert results[name].device.type == "cuda"
        assert (results[name].shape, results[name].dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_keeps_or_recomputes_it(policy, monkeypatch):
    made = inputs(Case(1, 4, 2, 6, torch.float32))
    calls = []
    forward = adaln_reference.forward
    monkeypatch.setattr(adaln_reference, "forward", lambda *arguments: calls.append(1) or forward(*arguments))

    def context():
        return create_selective_checkpoint_contexts(
            lambda _, operator, *a, **k: (
                policy if operator is torch.ops.headway.adaln.default else CheckpointPolicy.PREFER_RECOMPUTE
            )
        )

    x = made.x.clone().requires_grad_()
    _, output = checkpoint(lambda x: adaln(x * 1.0, made.scale, made.shift), x, use_reentrant=False, context_fn=context)
    (gradient,) = torch.autograd.grad(output, x, made.grad_output)
    assert len(calls) == (1 if policy == CheckpointPolicy.MUST_SAVE else 2)
    plain = made.x.clone().requires_grad_()
    assert torch.equal(
        gradient, torch.autograd.grad(adaln(plain, made.scale, made.shift)[1], plain, made.grad_output)[0]
    )


def distributed(residual: str) -> list[tuple[str, bool]]:
    """For splits of samples and tokens: whether results keep the split, and gradients are those of one device."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = []
    for rows, split, parameters in ((1, 0, Shard(0)), (1, 1, Replicate()), (2, 1, Shard(1)), (4, 1, Shard(1))):
        made = inputs(Case(2, 4, rows, 6, float64, residual=residual))
        right = eager(made, "layer", EPSILON)
        names = arguments_of(made)
        placed = {n: Shard(split) if n in ("x", "branch") else parameters for n in names}
        leaves = {n: distribute_tensor(getattr(made, n), mesh, [placed[n]]).requires_grad_() for n in names}
        hidden, output = adaln(**leaves, epsilon=EPSILON)
        upstream = [
            distribute_tensor(t, mesh, [Shard(split)]) for t in (made.grad_hidden, made.grad_output) if t is not None
        ]
        results = [output] if made.branch is None else [hidden, output]
        gradients = torch.autograd.grad(results, list(leaves.values()), upstream)
        held.append((f"split of {split}, {rows} rows", all(r.placements == (Shard(split),) for r in results)))
        for name, value in zip(right, [*results, *gradients], strict=True):
            assert isinstance(value, DTensor)
            held.append((f"{split} {rows} {name}", torch.allclose(value.full_tensor(), right[name], atol=1e-12)))
    return held


@pytest.mark.parametrize("residual", RESIDUALS)
def test_dtensors_keep_their_split_and_give_the_gradients_of_one_device(residual):
    for held in run_ranks(2, distributed, residual):
        assert [name for name, right in held if not right] == []
        assert len(held) > 16
