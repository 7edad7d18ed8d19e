"""Fused operators within unmodified models: what is recognised, what is fused, what is left and why."""

from headway.kernels.fusion.fuse import PATTERNS, Fused, Fusion, Left, fuse

__all__ = ["PATTERNS", "Fused", "Fusion", "Left", "fuse"]
