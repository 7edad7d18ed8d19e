"""Gated linear units in plain PyTorch: what every device without a kernel runs, and what the kernel is held to.

    y = a(gate) · value,   a = silu: g·σ(g);   gelu: g·Φ(g);   gelu_tanh: g·σ(2u), u = √(2/π)·(g + 0.044715·g³)

In float32 (float64 for float64 inputs), rounded once. Shazeer, "GLU Variants Improve Transformer", 2020.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.wide import wide_dtype

CUBIC = 0.044715


def forward(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """Return y, contiguous, of the shape of both."""
    wide = wide_dtype(gate.dtype)
    return (_activated(gate.to(wide), activation) * value.to(wide)).to(gate.dtype).contiguous()


def backward(grad: Tensor, gate: Tensor, value: Tensor, activation: str, grad_gate: Tensor, grad_value: Tensor) -> None:
    """Write the gradients: dgate = dy·value·a'(gate);  dvalue = dy·a(gate)."""
    wide = wide_dtype(gate.dtype)
    upstream, gates = grad.to(wide), gate.to(wide)
    grad_gate.copy_(upstream * value.to(wide) * _slope(gates, activation))
    grad_value.copy_(upstream * _activated(gates, activation))


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _slope(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        share = torch.sigmoid(gate)
        return share * (1 + gate * (1 - share))
    if activation == "gelu":
        density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(gate / math.sqrt(2))) + gate * density
    scale = 2 * math.sqrt(2 / math.pi)
    share = torch.sigmoid(scale * (gate + CUBIC * gate**3))
    return share + gate * share * (1 - share) * scale * (1 + 3 * CUBIC * gate.square())
