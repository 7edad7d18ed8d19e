"""What the kernels of gated linear units are proven with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import glu_triton
from headway.kernels.glu_triton import BLOCK, ELEMENTS_PER_THREAD, backward_kernel, forward_kernel
from headway.kernels.proof.accuracy import Verdict, judge
from headway.kernels.proof.interpreter import interpreted
from headway.kernels.proof.machine_code import Compiled

RESULTS = ("output", "grad_gate", "grad_value")
PACKED_RESULTS = ("output", "grad_packed")


@dataclass(frozen=True)
class Case:
    """Random inputs. ``strided``: rows are slices of wider ones."""

    samples: int
    tokens: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    packed: bool = False
    gate_first: bool = True
    strided: bool = False
    magnitude: float = 1.0

    def __str__(self) -> str:
        order = ("gate first" if self.gate_first else "value first") if self.packed else "apart"
        how = [self.activation, order, "strided" if self.strided else ""]
        size = f"x{self.magnitude:g}" if self.magnitude != 1 else ""
        shape = f"{self.samples}x{self.tokens}x{self.width}"
        return " ".join(filter(None, [shape, str(self.dtype).removeprefix("torch."), *how, size]))


CASES = (
    Case(2, 3, 96),
    Case(2, 3, 100, activation="gelu", packed=True, gate_first=False),
    Case(1, 5, 33, torch.float32, activation="gelu_tanh", packed=True),
    Case(1, 4, 17, torch.float16, activation="gelu", strided=True),
    Case(1, 2, 2500, torch.float32, strided=True),
    Case(1, 4, 48, magnitude=1e15),
    Case(1, 4, 48, torch.float32, activation="gelu_tanh", magnitude=1e-15),
)


@dataclass(frozen=True)
class Inputs:
    """Of forward, either packed or apart, and the gradient that backward is given."""

    packed: Tensor | None
    gate: Tensor | None
    value: Tensor | None
    grad_output: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """All of ``dtype``."""
        return Inputs(**{name: None if t is None else t.to(dtype) for name, t in vars(self).items()})  # type: ignore[arg-type]


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Made from ``seed``."""
    random = torch.Generator().manual_seed(seed)
    wider = 3 if case.strided else 1

    def rows(width: int, magnitude: float = 1.0) -> Tensor:
        shape = (case.samples, case.tokens * wider, width + wider - 1)
        made = (magnitude * torch.randn(shape, generator=random)).to(case.dtype)
        return made[:, case.tokens * (wider - 1) :, wider - 1 :]

    packed = rows(2 * case.width, case.magnitude) if case.packed else None
    gate, value = (None if case.packed else rows(case.width, case.magnitude) for _ in range(2))
    return Inputs(packed, gate, value, rows(case.width))


def eager(given: Inputs, case: Case) -> dict[str, Tensor]:
    """Results of PyTorch's own operations, and of autograd, in the dtype of the inputs."""
    leaves = [t.detach().requires_grad_() for t in (given.packed, given.gate, given.value) if t is not None]
    gate, value = leaves[0].chunk(2, -1) if case.packed else leaves
    if case.packed and not case.gate_first:
        gate, value = value, gate
    if case.activation == "silu":
        output = F.silu(gate) * value
    else:
        output = F.gelu(gate, approximate="tanh" if case.activation == "gelu_tanh" else "none") * value
    gradients = torch.autograd.grad(output, leaves, given.grad_output)
    return dict(zip(PACKED_RESULTS if case.packed else RESULTS, [output.detach(), *gradients], strict=True))


def kernel(given: Inputs, case: Case, order: int | None = None) -> dict[str, Tensor]:
    """Results of the kernels, interpreted, with programs shuffled by ``order``."""
    with interpreted(order):
        gate, value = given.gate, given.value
        if given.packed is not None:
            gradients = [given.packed.new_empty(given.packed.shape)]
            halves = [tensor.chunk(2, -1) for tensor in (given.packed, gradients[0])]
            (gate, value), written = halves if case.gate_first else [pair[::-1] for pair in halves]
        else:
            assert gate is not None
            assert value is not None
            gradients = [gate.new_empty(gate.shape) for _ in range(2)]
            written = gradients[0], gradients[1]
        output = glu_triton.forward(gate, value, case.activation)
        glu_triton.backward(given.grad_output, gate, value, case.activation, *written)
    return dict(zip(PACKED_RESULTS if case.packed else RESULTS, (output, *gradients), strict=True))


def check(case: Case, seed: int = 0) -> list[Verdict]:
    """Run the kernels on the interpreter and judge every result."""
    given = inputs(case, seed)
    results = kernel(given, case, order=seed)
    same, exact = eager(given, case), eager(given.to(torch.float64), case)
    return [judge(name, result, same[name], exact[name]) for name, result in results.items()]


def compiled() -> Iterator[Compiled]:
    """Both kernels of every activation, in bfloat16; one block serves rows of 1025 columns and more."""
    for activation in ("silu", "gelu", "gelu_tanh"):
        for direction, function in (("forward", forward_kernel), ("backward", backward_kernel)):
            constants = {"ACTIVATION": activation, "BLOCK": BLOCK}
            names = [name for name in function.arg_names if name not in constants]
            scalars = {name: "i32" for name in names if name.endswith("_row") or name in ("blocks", "width")}
            yield Compiled(
                f"glu {activation} {direction}",
                function,
                {name: "*bf16" for name in names if name not in scalars},
                scalars,
                constants,
                BLOCK // (32 * ELEMENTS_PER_THREAD),
                odd=frozenset({"blocks"}),
            )
