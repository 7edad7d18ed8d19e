"""Matrix products.

``t = max(2·m·n·k / (peak · e · filled · k/(k+k0)), bytes / (f · bandwidth)) + startup``

e is the share of the dense peak that large products of random operands reach on a hot device, k0 the depth at which
half of it is reached, ``filled`` the share of the processors that have a tile to work on. Tiles that do not divide
evenly among the processors are not charged for: on five of six measured devices that makes predictions worse, since
libraries change the tile, split the depth or run persistently. Sources of e and k0: ``headway.cluster``
(achieved.toml).
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster import Cluster, MatrixRate
from headway.cost.estimate import Estimate, Number, numbers
from headway.cost.memory_bound import memory_time
from headway.errors import UserError

ELEMENT_BYTES = {"float32": 4.0, "tf32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0, "float4": 0.5625}
"""Bytes of an operand's element; float4 with a one-byte scale for every sixteen."""
TILE = 64
"""Rows and columns of the smallest tile that libraries give a processor before they leave processors idle."""
UNALIGNED = 0.4
"""What is left of the rate where a row of an operand or the result does not begin at 16 bytes (NVIDIA's matrix
multiplication guide; nanoGPT gains a quarter of a step by filling its vocabulary up from 50,257 to 50,304)."""
IDLE_POWER = 0.12
"""Share of a device's power limit that it takes when idle."""


def matrix_product(
    cluster: Cluster,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    precision: str = "bfloat16",
    batch: ArrayLike = 1,
    output_bytes: float = 2.0,
) -> Estimate:
    """Time of ``batch`` products of ``[m, k]`` and ``[k, n]`` in ns, launch not included.

    Dimensions are numbers or arrays that broadcast. ``output_bytes``: of an element of the result. Raises UserError
    when the accelerator has no known peak in ``precision``.
    """
    rows, columns, depth, count = (numbers(dimension) for dimension in (m, n, k, batch))
    rate, peak = matrix_rate(cluster, precision)
    tiles = np.maximum(rows / TILE, 1) * np.maximum(columns / TILE, 1) * count
    reached = np.minimum(1, tiles / cluster.accelerator.processors) * depth / (depth + rate.half_depth)
    flops = 2 * rows * columns * depth * count
    elements = ELEMENT_BYTES[precision]
    moved = memory_time(cluster, count * (elements * depth * (rows + columns) + output_bytes * rows * columns))
    return _products(flops, peak, rate, reached).later(moved) + _startup(cluster, rate)


def grouped_matrix_product(
    cluster: Cluster,
    rows_per_group: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    groups: ArrayLike,
    precision: str = "bfloat16",
    output_bytes: float = 2.0,
) -> Estimate:
    """Time of one kernel of ``groups`` products of ``[rows_per_group, k]`` and ``[k, n]``, each with its own ``[k,
    n]``.

    The experts of a mixture. Besides as :func:`matrix_product` the efficiency falls with few rows a group:
    ``rows / (rows + half_rows)``, by fused MoE kernels of aiconfigurator, SimuMax and TorchAO.
    """
    rows, columns, depth, count = (numbers(dimension) for dimension in (rows_per_group, n, k, groups))
    rate, peak = matrix_rate(cluster, precision)
    reached = depth / (depth + rate.half_depth) * rows / (rows + rate.half_rows)
    flops = 2 * rows * columns * depth * count
    elements = ELEMENT_BYTES[precision]
    moved = memory_time(cluster, count * (elements * depth * (rows + columns) + output_bytes * rows * columns))
    return _products(flops, peak, rate, reached).later(moved) + _startup(cluster, rate)


def matrix_rate(cluster: Cluster, precision: str) -> tuple[MatrixRate, float]:
    """What products of ``precision`` reach, and the dense peak in FLOP/s. float16 runs as bfloat16 where it is not
    listed.

    Raises UserError when either is not known.
    """
    for known in (precision, "bfloat16") if precision == "float16" else (precision,):
        peak = cluster.accelerator.peak_tflops(known)
        rate = {str(key): value for key, value in cluster.achieved.matrix.items()}.get(known)
        if peak is not None and rate is not None:
            return rate, peak * 1e12 * _power_factor(cluster)
    raise UserError(
        f"{cluster.name}: no rate of {precision} matrix products is known on {cluster.accelerator.name}; "
        f"known: {', '.join(cluster.achieved.matrix)}. Give accelerator.dense_peak_tflops.{precision} and "
        f"achieved.matrix.{precision} in the cluster file, or calibrate"
    )


def _products(flops: Number, peak: float, rate: MatrixRate, reached: Number) -> Estimate:
    nanoseconds = 1e9 * flops / (peak * reached)
    efficiency = rate.efficiency
    return Estimate(nanoseconds / efficiency.value, nanoseconds / efficiency.high, nanoseconds / efficiency.low)


def _power_factor(cluster: Cluster) -> float:
    """What a power cap below the sold limit leaves of the rate.

    Large products run at the power limit; lowering it lowers clock and voltage together, so that the rate goes with
    about the square root of the power above idle (judgement; between a fixed voltage, 1, and a voltage that follows,
    1/3).
    """
    cap, limit = cluster.power_cap_w, cluster.accelerator.power_w
    if cap is None or limit is None or cap >= limit:
        return 1.0
    idle = IDLE_POWER * limit
    return math.sqrt(max(cap - idle, 0.05 * limit) / (limit - idle))


def _startup(cluster: Cluster, rate: MatrixRate) -> Estimate:
    return Estimate.exactly(1e3 * (cluster.achieved.memory.startup_us + rate.call_us))
