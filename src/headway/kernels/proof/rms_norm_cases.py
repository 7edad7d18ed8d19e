"""What the kernels of residual and RMSNorm are proven with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import rms_norm_triton
from headway.kernels.proof.accuracy import Verdict, judge
from headway.kernels.proof.interpreter import interpreted
from headway.kernels.proof.machine_code import Compiled
from headway.kernels.rms_norm_triton import backward_kernel, forward_kernel
from headway.kernels.rows_triton import block_and_warps

BLOCKS = (4096, 8192)
"""Of 8 B models (width 4096), and of 70 B ones (8192)."""
COUNTS = frozenset({"all_tokens", "tokens", "tokens_per_chunk"})
WIDE = ("rstd", "rstd_out", "grad_weight")
TOKENS = ("x", "branch", "weight", "hidden", "output", "grad_hidden", "grad_output", "grad_x")
RESULTS = ("hidden", "output", "grad_x", "grad_weight")
EPSILON = 1e-6


@dataclass(frozen=True)
class Case:
    """Random inputs. ``strided``: tokens are slices of a larger tensor."""

    samples: int
    tokens: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    added: bool = True
    offset: float = 0.0
    strided: bool = False
    magnitude: float = 1.0
    programs: int = 3
    """Of backward: few, so that several tokens share one."""

    def __str__(self) -> str:
        how = ["added" if self.added else "", "strided" if self.strided else "", f"+{self.offset:g}"]
        size = f"x{self.magnitude:g}" if self.magnitude != 1 else ""
        shape = f"{self.samples}x{self.tokens}x{self.width}"
        return " ".join(filter(None, [shape, str(self.dtype).removeprefix("torch."), *how, size]))


CASES = (
    Case(2, 4, 96),
    Case(2, 3, 100, offset=1.0, strided=True),
    Case(1, 5, 33, torch.float32),
    Case(1, 4, 17, torch.float16, added=False, strided=True),
    Case(1, 4, 48, magnitude=1e15),
    Case(1, 4, 48, torch.float32, magnitude=1e-15, added=False),
)


@dataclass(frozen=True)
class Inputs:
    """Of forward, and the gradients that backward is given."""

    x: Tensor
    branch: Tensor | None
    weight: Tensor
    grad_hidden: Tensor | None
    grad_output: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """All of ``dtype``."""
        return Inputs(**{name: None if t is None else t.to(dtype) for name, t in vars(self).items()})  # type: ignore[arg-type]


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Made from ``seed``."""
    random = torch.Generator().manual_seed(seed)
    wider = 3 if case.strided else 1

    def tokens(magnitude: float = 1.0) -> Tensor:
        shape = (case.samples, case.tokens * wider, case.width + wider - 1)
        made = (magnitude * torch.randn(shape, generator=random)).to(case.dtype)
        return made[:, case.tokens * (wider - 1) :, wider - 1 :]

    x, branch = tokens(case.magnitude), tokens(case.magnitude) if case.added else None
    weight = torch.randn(case.width * wider, generator=random).to(case.dtype)[::wider]
    return Inputs(x, branch, weight, tokens() if case.added else None, tokens())


def eager(given: Inputs, case: Case) -> dict[str, Tensor]:
    """Results of PyTorch's own operations, and of autograd, in the dtype of the inputs."""
    x, weight = (t.detach().requires_grad_() for t in (given.x, given.weight))
    hidden = x if given.branch is None else x + given.branch
    output = F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON) * (case.offset + weight)
    results, upstream = [output], [given.grad_output]
    if given.grad_hidden is not None:
        results, upstream = [hidden, *results], [given.grad_hidden, *upstream]
    gradients = torch.autograd.grad(results, [x, weight], upstream)
    names = RESULTS if given.branch is not None else RESULTS[1:]
    return dict(zip(names, [*(result.detach() for result in results), *gradients], strict=True))


def kernel(given: Inputs, case: Case, order: int | None = None) -> dict[str, Tensor]:
    """Results of the kernels, interpreted, with programs shuffled by ``order``."""
    with interpreted(order):
        hidden, output, rstd = rms_norm_triton.forward(given.x, given.branch, given.weight, EPSILON, case.offset)
        kept = given.x if given.branch is None else hidden
        gradients = rms_norm_triton.backward(
            given.grad_hidden, given.grad_output, kept, given.weight, rstd, case.offset, case.programs
        )
    named = dict(zip(RESULTS, (hidden, output, *gradients), strict=True))
    return {name: value for name, value in named.items() if name != "hidden" or case.added}


def check(case: Case, seed: int = 0) -> list[Verdict]:
    """Run the kernels on the interpreter and judge every result."""
    given = inputs(case, seed)
    results = kernel(given, case, order=seed)
    same, exact = eager(given, case), eager(given.to(torch.float64), case)
    return [judge(name, result, same[name], exact[name]) for name, result in results.items()]


def compiled() -> Iterator[Compiled]:
    """Both kernels with a residual, in bfloat16; a block serves every width up to it."""
    for block in BLOCKS:
        for direction, function in (("forward", forward_kernel), ("backward", backward_kernel)):
            _, warps = block_and_warps(block, direction)
            constants = {"ADDED": True, "BLOCK": block}
            names = [name for name in function.arg_names if name not in constants]
            pointers = {name: "*fp32" if name in WIDE else "*bf16" for name in names if name in TOKENS + WIDE}
            floats = ("epsilon", "offset")
            scalars = {name: "fp32" if name in floats else "i32" for name in names if name not in pointers}
            yield Compiled(
                f"rms_norm {direction}, width {block // 2 + 1} to {block}",
                function,
                pointers,
                scalars,
                constants,
                warps,
                odd=COUNTS & set(scalars),
                statistics=(0, 1) if direction == "forward" else (1, 0),
            )
