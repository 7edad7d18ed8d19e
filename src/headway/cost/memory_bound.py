"""Operators bound by memory: bytes over the share of the bandwidth that their kind reaches, and a start.

``t = bytes / (f · bandwidth) + startup``; f by kind from public kernel measurements (``headway.cluster``,
achieved.toml). Bytes are the least that the operator has to move: a fused kernel differs from its parts by its bytes.
"""

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster import Cluster, OperatorKind, Rate
from headway.cost.estimate import Estimate, Number, numbers

CROSS_ENTROPY_BYTES = {False: 40.0, True: 14.0}
"""Traffic of next-token cross-entropy per token and vocabulary entry, forward and backward, from bfloat16 logits: eager
(casts to float32, log-softmax, its gradient), and fused (Liger-Kernel benchmarks; llm-foundry rows prefer these)."""
HOST_COPY_FRACTION = (0.8, 0.6, 0.9)
"""Share of PCIe's bandwidth that copies from pinned memory reach, with its range, where it was not measured (judgement:
25 of 32 and 52 of 64 GB/s are usual)."""
HOST_COPY_STARTUP_US = 10.0


def memory_bound(cluster: Cluster, bytes_moved: ArrayLike, kind: OperatorKind = "pointwise") -> Estimate:
    """Time of one kernel of ``kind`` that moves ``bytes_moved`` (reads and writes together), launch not included."""
    return memory_time(cluster, bytes_moved, kind) + Estimate.exactly(1e3 * cluster.achieved.memory.startup_us)


def memory_time(cluster: Cluster, bytes_moved: ArrayLike, kind: OperatorKind = "pointwise") -> Estimate:
    """As :func:`memory_bound`, without the start of a kernel.

    Where a cache was measured, as many of the bytes as it holds go at its rate: the operator before has left them
    there.
    """
    rate, moved = cluster.achieved.memory, numbers(bytes_moved)
    if rate.cache is None:
        return _time(cluster, moved, rate.fraction[kind])
    cached = np.minimum(moved, 1e6 * rate.cache.megabytes)
    return _time(cluster, cached, rate.cache.fraction[kind]) + _time(cluster, moved - cached, rate.fraction[kind])


def cross_entropy(cluster: Cluster, tokens: ArrayLike, vocabulary: ArrayLike, fused: bool = False) -> Estimate:
    """Time of next-token cross-entropy over ``tokens`` × ``vocabulary`` logits, forward and backward."""
    return memory_bound(cluster, CROSS_ENTROPY_BYTES[fused] * numbers(tokens) * numbers(vocabulary))


def host_copy(cluster: Cluster, bytes_moved: ArrayLike) -> Estimate:
    """Time of a copy between device and pinned host memory, one way.

    Without a known link to the host the copy is within one memory: a read and a write of it.
    """
    link = cluster.accelerator.host_gb_per_s_unidirectional
    if link is None:
        return memory_bound(cluster, 2 * numbers(bytes_moved))
    fraction = cluster.achieved.host.copy_fraction or Rate.model_validate(HOST_COPY_FRACTION)
    nanoseconds = numbers(bytes_moved) / link
    startup = Estimate.exactly(1e3 * HOST_COPY_STARTUP_US)
    return Estimate(nanoseconds / fraction.value, nanoseconds / fraction.high, nanoseconds / fraction.low) + startup


def _time(cluster: Cluster, bytes_moved: Number, fraction: Rate) -> Estimate:
    nanoseconds = bytes_moved / cluster.accelerator.memory_bandwidth_gb_per_s
    return Estimate(nanoseconds / fraction.value, nanoseconds / fraction.high, nanoseconds / fraction.low)
