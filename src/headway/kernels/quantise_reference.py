"""Quantisation to float8 in plain PyTorch: what every device without a kernel runs, and what the kernel is held to.

Of the numbers that share a scale, with F the format's largest number (448 of e4m3, 57344 of e5m2):

    scale = largest |x| / F          codes = round(x / scale), saturated at ±F          x ≈ codes · scale

A scale is 1 where all its numbers are 0, and at least 2⁻¹²⁶. "mx" rounds it up to a power of two, so that nothing
saturates (Mishra et al. 2025, arXiv 2506.08027), and keeps its exponent alone (e8m0, OCP Microscaling Formats 1.0). A
NaN or an infinity makes NaN of its scale and of every code under it: it must not vanish in a product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCKS = {"block_1x128": (1, 128), "block_128x128": (128, 128), "mx": (1, 32)}
"""Rows and columns of numbers that share a scale."""
SCALINGS = ("tensor", "row", *BLOCKS)
SMALLEST = 2.0**-126
"""Of a scale: its reciprocal is a normal number."""


class Quantised(NamedTuple):
    """Codes [rows, columns] and scales; of "mx" in float8_e8m0fnu, of the others in float32."""

    codes: Tensor
    scales: Tensor

    def dequantised(self, scaling: str) -> Tensor:
        """The numbers that the codes stand for, float32 [rows, columns]."""
        rows, columns = self.codes.shape
        scales = self.scales.float()
        if scaling in BLOCKS:
            down, across = BLOCKS[scaling]
            scales = scales.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
        return self.codes.float() * scales


def scales_shape(scaling: str, rows: int, columns: int) -> tuple[int, ...]:
    """Of the scales of [rows, columns] numbers."""
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return rows, 1
    down, across = BLOCKS[scaling]
    return -(-rows // down), -(-columns // across)


def quantise(x: Tensor, scaling: str, number_format: str) -> Quantised:
    """Quantise ``x`` [rows, columns]."""
    target = FORMATS[number_format]
    largest = torch.finfo(target).max
    values = x.float()
    scales = scales_of(_largest_of(values, scaling), largest)
    if scaling == "mx":
        scales = rounded_up(scales)
    kept = scales.to(torch.float8_e8m0fnu) if scaling == "mx" else scales
    spread = _spread(scales, scaling, values.shape)
    codes = (values * spread.reciprocal()).clamp(-largest, largest).to(target)
    return Quantised(codes, kept)


def _largest_of(values: Tensor, scaling: str) -> Tensor:
    """Largest absolute number of each scale; NaN or infinity where one of its numbers is so."""
    sizes = values.abs()
    if not sizes.numel():
        return sizes.new_zeros(scales_shape(scaling, *values.shape))
    if scaling == "tensor":
        return sizes.amax()
    if scaling == "row":
        return sizes.amax(1, keepdim=True)
    down, across = BLOCKS[scaling]
    rows, columns = sizes.shape
    padded = torch.nn.functional.pad(sizes, (0, -columns % across, 0, -rows % down))
    return padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across).amax((1, 3))


def scales_of(sizes: Tensor, largest: float) -> Tensor:
    """Scales, float32, by the largest absolute numbers under them; ``largest`` of the format."""
    scales = torch.where(sizes == 0, 1.0, (sizes / largest).clamp(min=SMALLEST))
    return torch.where(sizes.isfinite(), scales, torch.nan)


def rounded_up(scales: Tensor) -> Tensor:
    """Positive float32 ``scales`` up to the next power of two."""
    pattern = scales.view(torch.int32)
    up = (pattern + 0x7FFFFF) & 0x7F800000
    return torch.where(scales.isfinite(), up.view(torch.float32), scales)


def _spread(scales: Tensor, scaling: str, shape: torch.Size) -> Tensor:
    """A scale for each number, or something that broadcasts to it."""
    if scaling not in BLOCKS:
        return scales
    down, across = BLOCKS[scaling]
    return scales.repeat_interleave(down, 0)[: shape[0]].repeat_interleave(across, 1)[:, : shape[1]]
