"""The optimizer's step: memory-bound, but for Muon's matrix products."""

from typing import Literal

from numpy.typing import ArrayLike

from headway.cluster import Cluster
from headway.cost.estimate import Estimate, numbers
from headway.cost.matrix import matrix_product
from headway.cost.memory_bound import memory_bound

NEWTON_SCHULZ_STEPS = 5
"""Of Muon (Jordan et al. 2024)."""
FOREACH_BYTES = {"adamw": 84.0, "sgd": 28.0}
"""Traffic per float32 parameter of torch's multi-tensor optimizers, one pass an elementary operation."""
FUSED_BYTES = {"adamw": 28.0, "sgd": 20.0}
"""Read parameter, gradient and states, write parameter and states: AdamW 4·4 + 3·4, SGD with momentum 3·4 + 2·4."""


def optimizer_step(
    cluster: Cluster,
    parameters: ArrayLike,
    kind: Literal["adamw", "sgd"] = "adamw",
    fused: bool = True,
    working_copy_bytes: float = 0.0,
) -> Estimate:
    """Time of a step over ``parameters`` float32 parameters with float32 states in ns, launch not included.

    ``working_copy_bytes``: written per parameter besides, such as 2 for a bfloat16 copy.
    """
    per_parameter = (FUSED_BYTES if fused else FOREACH_BYTES)[kind] + working_copy_bytes
    return memory_bound(cluster, per_parameter * numbers(parameters), "optimizer")


def muon_step(cluster: Cluster, rows: ArrayLike, columns: ArrayLike, precision: str = "bfloat16") -> Estimate:
    """Time of Muon's step for a ``[rows, columns]`` parameter: momentum, and Newton-Schulz on its shorter side r.

    Each of five steps takes ``X·Xᵀ`` [r, c]·[c, r], its square [r, r]·[r, r] and their product with X [r, r]·[r, c].
    """
    first, second = numbers(rows), numbers(columns)
    short, long = (first, second) if first <= second else (second, first)
    products = matrix_product(cluster, short, short, long, precision)
    products = products + matrix_product(cluster, short, short, short, precision)
    products = products + matrix_product(cluster, short, long, short, precision)
    return products * NEWTON_SCHULZ_STEPS + memory_bound(cluster, 28.0 * first * second, "optimizer")
