"""Attention.

``t = FLOP / (peak · e(head size) · keys/(keys+s0) · rows/(rows+x0)) + startup``

FLOP counts 4·batch·heads·queries·keys·head size forward and 2.5 times that backward (the scores are computed again),
less what a causal mask lets the kernel skip. s0: each row of tiles has a start and an end. x0 = processors × rows per
processor: with few heads and short sequences part of the device is idle; fitted to 120 public sweeps, the mean error is
7 % with this factor and 12 % without. Rates per kernel and generation: ``headway.cluster`` (achieved.toml).
"""

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster import AttentionRate, Cluster, Rate
from headway.cost.estimate import Estimate, Number, numbers
from headway.cost.matrix import matrix_product, matrix_rate
from headway.cost.memory_bound import memory_bound, memory_time
from headway.errors import UserError

BACKWARD_PRODUCTS = 2.5
"""Products of the backward pass over those of the forward pass: five over two."""
UNFUSED_BYTES = {False: 9.0, True: 11.0}
"""Traffic per score of attention from single operators besides its products, in 16 bits: forward softmax (2 + 2) and
dropout (2 + 2 and a mask of 1); backward dropout (2 + 1 + 2) and softmax (2 + 2 + 2). Scale and mask are the softmax's,
as in Megatron's fused kernel."""


def attention(
    cluster: Cluster,
    batch: ArrayLike,
    heads: ArrayLike,
    queries: ArrayLike,
    keys: ArrayLike,
    head_size: int,
    *,
    causal: bool = False,
    skips_masked: bool = True,
    backward: bool = False,
    kernel: str | None = None,
    value_head_size: int | None = None,
) -> Estimate:
    """Time of one pass of fused attention in ns, launch not included. Sizes are numbers or arrays that broadcast.

    ``heads``: of the queries. ``skips_masked``: whether the kernel leaves out tiles that the causal mask hides
    (llm-foundry's did not). ``kernel``: a name of ``cluster.achieved.attention``; None: its default. Raises UserError
    for an unknown one.
    """
    samples, query_heads, rows, columns = (numbers(size) for size in (batch, heads, queries, keys))
    rate = attention_rate(cluster, kernel)
    value_size = head_size if value_head_size is None else value_head_size
    seen = visible_share(rows, columns, rate.tile_keys) if causal and skips_masked else 1.0
    flops = 2 * samples * query_heads * rows * columns * (head_size + value_size) * seen
    flops = flops * (BACKWARD_PRODUCTS if backward else 1.0)
    all_rows = samples * query_heads * rows
    half_rows = rate.rows_per_processor * cluster.accelerator.processors
    seen_keys = columns * seen
    reached = seen_keys / (seen_keys + rate.half_keys) * all_rows / (all_rows + half_rows)
    efficiency = _at_head_size(rate.backward if backward else rate.forward, (head_size + value_size) / 2)
    _, peak = matrix_rate(cluster, "bfloat16")
    nanoseconds = 1e9 * flops / (peak * reached)
    computed = Estimate(nanoseconds / efficiency.value, nanoseconds / efficiency.high, nanoseconds / efficiency.low)
    touched = 2 * samples * query_heads * (rows + columns) * (head_size + value_size) * (2 if backward else 1)
    startup = Estimate.exactly(2e3 * cluster.achieved.memory.startup_us)
    return computed.later(memory_time(cluster, touched)) + startup


def unfused_attention(
    cluster: Cluster,
    batch: ArrayLike,
    heads: ArrayLike,
    queries: ArrayLike,
    keys: ArrayLike,
    head_size: int,
    *,
    backward: bool = False,
) -> Estimate:
    """Time of one pass of attention from single operators: its products, and the traffic of the score matrix."""
    count = numbers(batch) * numbers(heads)
    rows, columns = numbers(queries), numbers(keys)
    scores = matrix_product(cluster, rows, columns, head_size, batch=count)
    mixed = matrix_product(cluster, rows, head_size, columns, batch=count)
    traffic = memory_bound(cluster, UNFUSED_BYTES[backward] * count * rows * columns, "softmax")
    return (scores + mixed) * (2 if backward else 1) + traffic


def attention_rate(cluster: Cluster, kernel: str | None = None) -> AttentionRate:
    """What a kernel reaches; None: the default one. Raises UserError naming the known ones."""
    name = kernel or cluster.achieved.attention_kernel
    if name not in cluster.achieved.attention:
        known = ", ".join(cluster.achieved.attention)
        raise UserError(
            f"{cluster.name}: attention kernel {name!r} is not known on {cluster.accelerator.name} ({known})"
        )
    return cluster.achieved.attention[name]


def visible_share(queries: Number, keys: Number, tile_keys: float = 1) -> Number:
    """Share of the scores that a causal mask leaves, the last query seeing all keys, in whole tiles of keys."""
    share: Number = 1 - np.maximum(np.minimum(queries, keys) - tile_keys, 0) / (2 * keys)
    return share


def _at_head_size(rates: dict[int, Rate], head_size: float) -> Rate:
    """Between the head sizes that were measured in proportion; below the smallest one less with the size."""
    sizes = sorted(rates)
    shrunk = min(1.0, head_size / sizes[0])

    def along(end: str) -> float:
        return shrunk * float(np.interp(head_size, sizes, [getattr(rates[size], end) for size in sizes]))

    return Rate(value=along("value"), low=along("low"), high=along("high"))
