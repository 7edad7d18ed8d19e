"""The host that launches, and compute that runs beside communication."""

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster import Cluster
from headway.cost.estimate import Estimate, Number, numbers


def launch(cluster: Cluster, operators: ArrayLike) -> Estimate:
    """Host time to launch ``operators`` eager operators one by one, in ns. Where it is longer than their kernels, the
    device waits for the host. A replayed graph launches one.
    """
    rate = cluster.achieved.host.operator_us
    count = 1e3 * numbers(operators)
    return Estimate(count * rate.value, count * rate.low, count * rate.high)


def slowed_by_communication(cluster: Cluster, compute: Estimate, beside_ns: Number) -> Estimate:
    """``compute`` while communication runs beside it for ``beside_ns``: collectives take processors, memory and power.

    The part that runs beside is longer by ``compute_slowdown``, and no more than all of it can be.
    """
    rate = cluster.achieved.compute_slowdown
    return Estimate(
        compute.value + rate.value * np.minimum(beside_ns, compute.value),
        compute.low + rate.low * np.minimum(beside_ns, compute.low),
        compute.high + rate.high * np.minimum(beside_ns, compute.high),
    )
