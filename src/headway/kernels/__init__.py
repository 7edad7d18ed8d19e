"""Fused operators: each a reference in plain PyTorch, and a GPU kernel that is proven without a GPU."""

from headway.kernels.adaln import adaln
from headway.kernels.catalogue import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator", "adaln"]
