"""What adaLN's kernels are proven with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import adaln_triton
from headway.kernels.adaln_triton import backward_kernel, forward_kernel
from headway.kernels.proof.accuracy import Verdict, judge
from headway.kernels.proof.interpreter import interpreted
from headway.kernels.proof.machine_code import Compiled
from headway.kernels.proof.rows_cases import sum_of_parts
from headway.kernels.rows_triton import block_and_warps

BLOCKS = (4096, 8192)
"""Of Flux and HunyuanVideo (width 3072), and of Wan 14B (5120)."""
COUNTS = frozenset({"tokens", "rows", "tokens_per_row", "chunks", "tokens_per_chunk"})
TOKENS = ("x", "branch", "hidden", "output", "grad_hidden", "grad_output", "grad_x", "grad_branch")
PARAMETERS = ("gate", "scale", "shift")

RESULTS = ("hidden", "output", "grad_x", "grad_branch", "grad_gate", "grad_scale", "grad_shift")


def results_of(given: "Inputs") -> tuple[str, ...]:
    """Names of the results that there are."""
    lacking = {"hidden", "grad_branch"} if given.branch is None else set()
    return tuple(name for name in RESULTS if name not in lacking and (name != "grad_gate" or given.gate is not None))


@dataclass(frozen=True)
class Case:
    """Random inputs. ``strided``: tokens are slices of a larger tensor, parameters columns of one, as in models."""

    samples: int
    tokens: int
    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    norm: str = "layer"
    residual: Literal["gated", "added", "none"] = "gated"
    strided: bool = False
    magnitude: float = 1.0
    programs: int = 3
    """Of backward: few, so that several chunks of tokens share a row of the parameters."""

    def __str__(self) -> str:
        how = [self.norm, self.residual.replace("none", ""), "strided" if self.strided else ""]
        size = f"x{self.magnitude:g}" if self.magnitude != 1 else ""
        shape = f"{self.samples}x{self.tokens}x{self.width}/{self.rows}"
        return " ".join(filter(None, [shape, str(self.dtype).removeprefix("torch."), *how, size]))


CASES = (
    Case(2, 6, 1, 96),
    Case(2, 6, 3, 100, norm="rms", strided=True),
    Case(1, 5, 5, 33, torch.float32),
    Case(1, 4, 2, 17, torch.float16, strided=True),
    Case(2, 3, 1, 64, torch.float32, norm="rms", residual="none"),
    Case(1, 3, 1, 1, torch.float32, residual="none", strided=True),
    Case(2, 4, 2, 72, residual="added", strided=True),
    Case(1, 4, 1, 48, magnitude=1e15),
    Case(1, 4, 2, 48, torch.float32, magnitude=1e-15),
)
"""Of every kind one; few and small, because an interpreted program takes some 10 ms."""


@dataclass(frozen=True)
class Inputs:
    """Of forward, and the gradients that backward is given."""

    x: Tensor
    branch: Tensor | None
    gate: Tensor | None
    scale: Tensor
    shift: Tensor
    grad_hidden: Tensor | None
    grad_output: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """All of ``dtype``, as leaves of their own."""
        wide = {name: None if t is None else t.detach().to(dtype, copy=True) for name, t in vars(self).items()}
        return Inputs(**wide)  # type: ignore[arg-type]


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Made from ``seed``."""
    random = torch.Generator().manual_seed(seed)
    wider = 3 if case.strided else 1

    def tokens(magnitude: float = 1.0) -> Tensor:
        shape = (case.samples, case.tokens * wider, case.width + wider - 1)
        made = (magnitude * torch.randn(shape, generator=random)).to(case.dtype)
        return made[:, case.tokens * (wider - 1) :, wider - 1 :]

    def parameter() -> Tensor:
        made = torch.randn((case.samples, case.rows, case.width * wider), generator=random).to(case.dtype)
        return made[:, :, case.width * (wider - 1) :]

    added = case.residual != "none"
    x, branch = tokens(case.magnitude), tokens(case.magnitude) if added else None
    gate = parameter() if case.residual == "gated" else None
    grad_hidden = tokens() if added else None
    return Inputs(x, branch, gate, parameter(), parameter(), grad_hidden, tokens())


def eager(given: Inputs, norm: str, epsilon: float) -> dict[str, Tensor]:
    """Results of PyTorch's own operations, and of autograd, in the dtype of the inputs."""
    named = {name: getattr(given, name) for name in ("x", "branch", "gate", "scale", "shift")}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items() if tensor is not None}
    hidden, scale, shift = leaves["x"], leaves["scale"], leaves["shift"]
    times = hidden.shape[1] // scale.shape[1]
    if "gate" in leaves:
        hidden = hidden + leaves["gate"].repeat_interleave(times, 1) * leaves["branch"]
    elif "branch" in leaves:
        hidden = hidden + leaves["branch"]
    width = hidden.shape[-1:]
    normed = F.layer_norm(hidden, width, eps=epsilon) if norm == "layer" else F.rms_norm(hidden, width, eps=epsilon)
    output = normed * (1 + scale.repeat_interleave(times, 1)) + shift.repeat_interleave(times, 1)
    results = [] if given.grad_hidden is None else [(hidden, given.grad_hidden)]
    results.append((output, given.grad_output))
    tensors, upstream = zip(*results, strict=True)
    gradients = torch.autograd.grad(tensors, list(leaves.values()), upstream)
    values = [*(tensor.detach() for tensor in tensors), *gradients]
    return dict(zip(results_of(given), values, strict=True))


def kernel(given: Inputs, case: Case, epsilon: float, order: int | None = None) -> dict[str, Tensor]:
    """Results of the kernels, interpreted, with programs shuffled by ``order``; of what has no branch, none."""
    with interpreted(order):
        hidden, output, mean, rstd = adaln_triton.forward(
            given.x, given.branch, given.gate, given.scale, given.shift, case.norm, epsilon
        )
        kept = hidden if given.branch is not None else given.x
        gated = None if given.gate is None else given.branch
        gradients = adaln_triton.backward(
            given.grad_hidden, given.grad_output, kept, gated, given.gate, given.scale, mean, rstd,
            case.norm, case.programs,
        )  # fmt: skip
    named = dict(zip(RESULTS, (hidden, output, *gradients), strict=True))
    if given.branch is not None and given.gate is None:
        named["grad_branch"] = named["grad_x"]
    return {name: named[name] for name in results_of(given)}


def check(case: Case, seed: int = 0, epsilon: float = 1e-6) -> list[Verdict]:
    """Run the kernels on the interpreter and judge every result."""
    given = inputs(case, seed)
    results = kernel(given, case, epsilon, order=seed)
    same = eager(given, case.norm, epsilon)
    exact = eager(given.to(torch.float64), case.norm, epsilon)
    return [judge(name, result, same[name], exact[name]) for name, result in results.items()]


def compiled() -> Iterator[Compiled]:
    """Each kernel with residual and LayerNorm, in bfloat16; a block serves every width up to it."""
    for block in BLOCKS:
        for direction, function in (("forward", forward_kernel), ("backward", backward_kernel)):
            _, warps = block_and_warps(block, direction)
            constants = {"ADDED": True, "GATED": True, "CENTRED": True, "BLOCK": block}
            names = [name for name in function.arg_names if name not in constants]
            pointers = {name: _pointer(name) for name in names if _pointer(name)}
            scalars = {name: "fp32" if name == "epsilon" else "i32" for name in names if name not in pointers}
            yield Compiled(
                f"adaln {direction}, width {block // 2 + 1} to {block}",
                function,
                pointers,
                scalars,
                constants,
                warps,
                odd=COUNTS & set(scalars),
                statistics=(0, 2) if direction == "forward" else (2, 0),
            )
    yield sum_of_parts("sum of parts")


def _pointer(name: str) -> str:
    if name in TOKENS or name in PARAMETERS:
        return "*bf16"
    if name in ("mean", "rstd", "mean_out", "rstd_out", *(f"grad_{each}" for each in PARAMETERS)):
        return "*fp32"
    return ""
