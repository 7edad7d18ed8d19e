"""What each operator is timed with: sizes of real models, the same in PyTorch's own operations, bytes that move."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import (
    Average,
    Rounding,
    adaln,
    adamw_,
    glu_packed,
    key_of,
    norm_rope,
    place_of,
    quantise_both,
    quantise_reference,
    rms_norm,
)

EPSILON = 1e-6


@dataclass(frozen=True)
class Workload:
    """An operator at one size. Functions take the tensors that ``inputs`` makes, and return one or several."""

    operator: str
    name: str
    inputs: Callable[[], tuple[Any, ...]]
    ways: dict[str, Callable[..., Any]]
    """"fused" is ours; "eager" is compiled, too."""
    forward_bytes: float
    """That must be read and written, each once."""
    backward_bytes: float | None
    """None: there is no backward pass."""
    compiled: bool = field(default=True)
    """Whether the eager way is also timed compiled."""


def workloads(device: torch.device, dry: bool) -> Iterator[Workload]:
    """All of them; ``dry``: so small that they take no time."""
    scale = 256 if dry else 1
    yield _adaln(device, 32_760 // scale, 64 if dry else 5120)
    yield _rms_norm(device, 8192 // scale, 64 if dry else 4096)
    yield _glu(device, 32_760 // scale, 64 if dry else 13_824)
    yield _norm_rope(device, 32_760 // scale, 2 if dry else 40, 128)
    yield _adamw(device, 4 if dry else 64, 64 if dry else 1848)
    for scaling in quantise_reference.SCALINGS:
        yield _quantise(device, 32_760 // scale, 256 if dry else 5120, scaling)


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _adaln(device: torch.device, tokens: int, width: int) -> Workload:
    def inputs() -> tuple[Tensor, ...]:
        parameters = [_random(device, 1, 1, width) for _ in range(3)]
        made = [_random(device, 1, tokens, width), _random(device, 1, tokens, width), *parameters]
        return tuple(tensor.requires_grad_() for tensor in made)

    def fused(x: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return adaln(x, scale, shift, branch=branch, gate=gate, epsilon=EPSILON)

    def eager(x: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x + gate * branch
        return hidden, F.layer_norm(hidden, hidden.shape[-1:], eps=EPSILON) * (1 + scale) + shift

    size = 2.0 * tokens * width
    return Workload("adaln", f"{tokens}x{width}", inputs, {"fused": fused, "eager": eager}, 4 * size, 6 * size)


def _rms_norm(device: torch.device, tokens: int, width: int) -> Workload:
    def inputs() -> tuple[Tensor, ...]:
        made = (_random(device, tokens, width), _random(device, tokens, width), _random(device, width))
        return tuple(tensor.requires_grad_() for tensor in made)

    def fused(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, branch=branch, epsilon=EPSILON)

    def eager(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x + branch
        return hidden, F.rms_norm(hidden, weight.shape, weight, EPSILON)

    ways = {"fused": fused, "eager": eager}
    if device.type == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        def liger(x: Tensor, branch: Tensor, weight: Tensor) -> Any:
            normed, hidden = LigerFusedAddRMSNormFunction.apply(x, branch, weight, EPSILON)
            return hidden, normed

        ways["liger"] = liger
    size = 2.0 * tokens * width
    return Workload("rms_norm", f"{tokens}x{width}", inputs, ways, 4 * size, 4 * size)


def _glu(device: torch.device, tokens: int, width: int) -> Workload:
    def eager(packed: Tensor) -> Tensor:
        gate, value = packed.chunk(2, -1)
        return F.silu(gate) * value

    ways: dict[str, Callable[..., Any]] = {"fused": glu_packed, "eager": eager}
    if device.type == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        ways["liger"] = lambda packed: LigerSiLUMulFunction.apply(*packed.chunk(2, -1))
    size = 2.0 * tokens * width
    inputs = lambda: (_random(device, tokens, 2 * width).requires_grad_(),)  # noqa: E731
    return Workload("glu", f"{tokens}x{width}", inputs, ways, 3 * size, 5 * size)


def _norm_rope(device: torch.device, tokens: int, heads: int, channels: int) -> Workload:
    angles = torch.arange(tokens, device=device)[:, None] * torch.arange(channels // 2, device=device)
    cos, sin = angles.float().cos()[None], angles.float().sin()[None]

    def inputs() -> tuple[Tensor, ...]:
        made = (_random(device, 1, tokens, heads, channels), _random(device, channels))
        return tuple(tensor.requires_grad_() for tensor in made)

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return norm_rope(x, weight, cos=cos, sin=sin, pairs="half", epsilon=EPSILON)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        first, second = F.rms_norm(x, weight.shape, weight, EPSILON).float().chunk(2, -1)
        c, s = cos[:, :, None], sin[:, :, None]
        return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)

    size, tables = 2.0 * tokens * heads * channels, 4.0 * tokens * channels
    ways = {"fused": fused, "eager": eager}
    name = f"{tokens}x{heads}x{channels}"
    return Workload("norm_rope", name, inputs, ways, 2 * size + tables, 3 * size + tables)


def _adamw(device: torch.device, tensors: int, side: int) -> Workload:
    shape = (side, side)
    numbers = range(tensors)
    rounding = Rounding([place_of(shape, (0, 0), shape)] * tensors, [key_of(0, "gpu", str(n)) for n in numbers], 1)
    one = torch.ones((), device=device)

    def inputs() -> tuple[list[Tensor], ...]:
        weights, gradients = ([_random(device, *shape) for _ in numbers] for _ in range(2))
        wide = [[_random(device, *shape, dtype=torch.float32).abs() for _ in numbers] for _ in range(3)]
        return weights, gradients, *wide

    def fused(weights: list[Tensor], gradients: list[Tensor], first: Any, second: Any, average: Any) -> None:
        adamw_(
            weights, gradients, first, second, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decays=[0.1] * tensors,
            updates=10, scale=one, averages=[Average(average, 1e-3)], rounding=rounding,
        )  # fmt: skip

    steps = [torch.full((), 10.0, device=device) for _ in numbers]

    def eager(weights: list[Tensor], gradients: list[Tensor], first: Any, second: Any, average: Any) -> None:
        """PyTorch's own fused AdamW and a multi-tensor average, to nearest; moments as narrow as its weights."""
        torch._foreach_mul_(gradients, 1.0)
        torch._fused_adamw_(
            weights, gradients, [m.bfloat16() for m in first], [v.bfloat16() for v in second], [], steps,
            lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_lerp_(average, [weight.float() for weight in weights], 1e-3)

    moved = 30.0 * tensors * math.prod(shape)
    ways = {"fused": fused, "eager": eager}
    return Workload("adamw", f"{tensors} of {side}x{side}", inputs, ways, moved, None, compiled=False)


def _quantise(device: torch.device, rows: int, columns: int, scaling: Any) -> Workload:
    def fused(x: Tensor) -> tuple[Tensor, ...]:
        (codes, scales), (transposed, others) = quantise_both(x, scaling)
        return codes, scales, transposed, others

    def eager(x: Tensor) -> tuple[Tensor, ...]:
        there = quantise_reference.quantise(x.mT, scaling, "e4m3")
        return *quantise_reference.quantise(x, scaling, "e4m3"), there.codes.contiguous(), there.scales

    # bfloat16 is read, and read again where a scale is of more than a tile; codes are written twice.
    moved = (4.0 if scaling in quantise_reference.BLOCKS else 6.0) * rows * columns
    inputs = lambda: (_random(device, rows, columns),)  # noqa: E731
    return Workload("quantise", f"{scaling} {rows}x{columns}", inputs, {"fused": fused, "eager": eager}, moved, None)
