"""Gated linear units (SwiGLU, GEGLU) as one operator, forward and backward; gate and value apart or in one tensor."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from headway.kernels import glu_reference

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def glu(gate: Tensor, value: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate)·value.

    Args:
        gate, value: [..., width], of one shape and dtype, which are the result's.
        activation: "silu" (SwiGLU), "gelu" (GEGLU, by the error function) or "gelu_tanh".
    Raises:
        ValueError: shapes or dtypes do not go together, or the activation is none.
    Inputs are never written to and may have any strides. Computed in float32 (float64 for float64), rounded once.
    """
    _check(activation)
    if gate.shape != value.shape or gate.dtype != value.dtype:
        raise ValueError(f"glu: gate is {list(gate.shape)} {gate.dtype}, value {list(value.shape)} {value.dtype}")
    return glu_forward(gate, value, activation)


def glu_packed(packed: Tensor, activation: Activation = "silu", *, gate_first: bool = True) -> Tensor:
    """As ``glu`` of the two halves of ``packed`` [..., 2·width], whose gradient is made in one tensor too.

    ``gate_first``: the gate is the first half, the value the second. Raises ValueError for an odd last dimension.
    """
    _check(activation)
    if packed.shape[-1] % 2:
        raise ValueError(f"glu_packed: {packed.shape[-1]} columns have no halves")
    return glu_packed_forward(packed, activation, gate_first)


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu: activation {activation!r} is none of {', '.join(ACTIVATIONS)}")


def _halves(packed: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Gate and value, as views."""
    first, second = packed.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


@torch.library.custom_op("headway::glu", mutates_args=())
def glu_forward(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """activation(gate)·value."""
    return glu_reference.forward(gate, value, activation)


@torch.library.custom_op("headway::glu_backward", mutates_args=())
def glu_backward(grad: Tensor, gate: Tensor, value: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and value."""
    return _apart(glu_reference, grad, gate, value, activation)


@torch.library.custom_op("headway::glu_packed", mutates_args=())
def glu_packed_forward(packed: Tensor, activation: str, gate_first: bool) -> Tensor:
    """The same of the halves of one tensor."""
    return glu_reference.forward(*_halves(packed, gate_first), activation)


@torch.library.custom_op("headway::glu_packed_backward", mutates_args=())
def glu_packed_backward(grad: Tensor, packed: Tensor, activation: str, gate_first: bool) -> Tensor:
    """Gradient of both halves in one tensor."""
    return _packed(glu_reference, grad, packed, activation, gate_first)


def _apart(way: Any, grad: Tensor, gate: Tensor, value: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    grad_gate, grad_value = gate.new_empty(gate.shape), value.new_empty(value.shape)
    way.backward(grad, gate, value, activation, grad_gate, grad_value)
    return grad_gate, grad_value


def _packed(way: Any, grad: Tensor, packed: Tensor, activation: str, gate_first: bool) -> Tensor:
    grad_packed = packed.new_empty(packed.shape)
    gradients = _halves(grad_packed, gate_first)
    way.backward(grad, *_halves(packed, gate_first), activation, *gradients)
    return grad_packed


def _way(tensor: Tensor) -> Any:
    from headway.kernels import glu_triton

    return glu_triton if glu_triton.fits(tensor) else glu_reference


@glu_forward.register_kernel("cuda")
def _(gate, value, activation):
    return _way(gate).forward(gate, value, activation)


@glu_backward.register_kernel("cuda")
def _(grad, gate, value, activation):
    return _apart(_way(gate), grad, gate, value, activation)


@glu_packed_forward.register_kernel("cuda")
def _(packed, activation, gate_first):
    return _way(packed).forward(*_halves(packed, gate_first), activation)


@glu_packed_backward.register_kernel("cuda")
def _(grad, packed, activation, gate_first):
    return _packed(_way(packed), grad, packed, activation, gate_first)


@glu_forward.register_fake
def _(gate, value, activation):
    return gate.new_empty(gate.shape)


@glu_backward.register_fake
def _(grad, gate, value, activation):
    return gate.new_empty(gate.shape), value.new_empty(value.shape)


@glu_packed_forward.register_fake
def _(packed, activation, gate_first):
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


@glu_packed_backward.register_fake
def _(grad, packed, activation, gate_first):
    return packed.new_empty(packed.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, value, ctx.activation = inputs
    ctx.save_for_backward(gate, value)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *glu_backward(grad, *ctx.saved_tensors, ctx.activation), None


def _keep_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, ctx.activation, ctx.gate_first = inputs
    ctx.save_for_backward(packed)


def _differentiate_packed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return glu_packed_backward(grad, *ctx.saved_tensors, ctx.activation, ctx.gate_first), None, None


glu_forward.register_autograd(_differentiate, setup_context=_keep)
glu_packed_forward.register_autograd(_differentiate_packed, setup_context=_keep_packed)


@register_sharding(torch.ops.headway.glu.default)
def _(gate, value, activation):
    ways = [Replicate(), *map(Shard, range(len(gate.shape)))]
    return [([way], [way, way, None]) for way in ways]


@register_sharding(torch.ops.headway.glu_backward.default)
def _(grad, gate, value, activation):
    ways = [Replicate(), *map(Shard, range(len(gate.shape)))]
    return [([way, way], [way, way, way, None]) for way in ways]


@register_sharding(torch.ops.headway.glu_packed.default)
def _(packed, activation, gate_first):
    ways = [Replicate(), *map(Shard, range(len(packed.shape) - 1))]
    return [([way], [way, None, None]) for way in ways]


@register_sharding(torch.ops.headway.glu_packed_backward.default)
def _(grad, packed, activation, gate_first):
    ways = [Replicate(), *map(Shard, range(len(packed.shape) - 1))]
    return [([way], [way, way, None, None]) for way in ways]
