"""How far from float32 the rounding of a narrow precision may take one device: what a fault is told from.

Rounding to a format with so many bits of mantissa leaves a relative error that is uniform within half a unit in the
last place. Of mantissas m whose logarithms are uniform its root mean square is 2^-bits / sqrt(12) times the root of the
mean of 1 / m², which is 3 / (8 ln 2). Errors are independent, so those of a product's operands, and of one product
after another, add up in squares (Higham & Mary 2019, A new approach to probabilistic rounding error analysis, SIAM
J. Sci. Comput. 41(5)).
"""

import math

from headway.check.setting import Precision
from headway.recipe import Recipe

MANTISSA_BITS = {"bfloat16": 7, "e4m3": 3, "e5m2": 2}
OPERANDS = {
    "compute": ("bfloat16", "bfloat16"),
    "float8_tensorwise": ("e4m3", "e5m2"),
    "float8_rowwise": ("e4m3", "e4m3"),
    "mxfp8": ("e4m3", "e4m3"),
}
"""By precision.matmul the formats of weights and activations, and of gradients."""
PRODUCTS_IN_A_ROW = 64
"""Between a parameter and its gradient, forward and back: toys of four blocks have some fifty."""
DEVIATIONS = 6.0
"""Of some thousand normal numbers the largest is below four deviations; some gradients sum few products."""


def rounding_error(number_format: str) -> float:
    """Root mean square of the relative error of rounding to a format."""
    return 2.0 ** -MANTISSA_BITS[number_format] * math.sqrt(3 / (8 * math.log(2)) / 12)


def product_error(recipe: Recipe, precision: Precision) -> float:
    """Relative error of one matrix product of backward; of float32, which sets its own bounds, none."""
    if precision == "float32":
        return 0.0
    matmul = recipe.precision.matmul if precision == "recipe" else "compute"
    return math.hypot(*(rounding_error(each) for each in OPERANDS[matmul]))


def one_device_bound(recipe: Recipe, precision: Precision) -> float:
    """How far one device may be from float32 in anything that is compared: a fault is far beyond, or infinite."""
    return DEVIATIONS * math.sqrt(PRODUCTS_IN_A_ROW) * product_error(recipe, precision)
