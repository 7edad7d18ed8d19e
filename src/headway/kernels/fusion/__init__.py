"""Fused operators within unmodified models: what is recognised, what is fused, what is left and why."""

from headway.kernels.fusion.fuse import Fused, Fusion, Left, fuse

__all__ = ["Fused", "Fusion", "Left", "fuse"]
