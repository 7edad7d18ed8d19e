"""The dtype in which operators compute and add up."""

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a tensor of ``dtype`` is computed and accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
