"""Casting operands of matrix products to eight- and four-bit formats.

Traffic per operand element as TransformerEngine's gemm_profiling page implies (B300, hidden size 4,096, 15,872 tokens:
time of a layer with and without its casts, at the rate that casts reach): a maximum, the cast, and the transposed copy
that the weight gradient needs.
"""

from typing import Literal

from numpy.typing import ArrayLike

from headway.cluster import Cluster
from headway.cost.estimate import Estimate, numbers
from headway.cost.memory_bound import memory_bound

QuantisationRecipe = Literal["delayed", "current", "rowwise", "mx", "block", "nvfp4", "fused", "nvfp4_fused"]
CAST_BYTES: dict[str, float] = {
    "delayed": 7.0,
    "current": 14.0,
    "rowwise": 22.0,
    "mx": 12.0,
    "block": 24.0,
    "nvfp4": 18.0,
    "fused": 5.0,
    "nvfp4_fused": 9.0,
}
"""Per element of an activation or a gradient. ``fused``: the norm or activation
before it writes the cast itself (``nvfp4_fused``: with a rotated, transposed copy).
``rowwise``: scales by row and by column are two casts (torchao)."""


def quantise(cluster: Cluster, elements: ArrayLike, recipe: QuantisationRecipe) -> Estimate:
    """Time to cast ``elements`` of an operand, launch not included."""
    return memory_bound(cluster, CAST_BYTES[recipe] * numbers(elements), "cast")
