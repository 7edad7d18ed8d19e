"""Closed formulas of what one rank sends in a step, for each axis of a layout.

Each is exact for the layouts of this project: messages and bytes by collective, in the terms of ``traffic.py``. Sizes
are numbers of elements unless they are called bytes; ``element`` is the bytes of an element of the compute dtype.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from communication.traffic import Traffic, all_gather, all_reduce, all_to_all, reduce_scatter, send, together

Shape = tuple[int, ...]

# Data parallelism


def padded(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of parameters whose dimension 0 is filled up to a multiple of ``ranks``.

    FSDP2 shards dimension 0 of each parameter and pads the last rank's rows, so that all pieces are alike.
    """
    return sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes)


def fully_sharded(
    blocks: Sequence[Sequence[Shape]],
    root: Sequence[Shape],
    *,
    ranks: int,
    element: int,
    reduced_element: int,
    block_gathers: Sequence[int],
    root_gathers: int,
) -> Traffic:
    """FSDP2: each unit is gathered when it is used, and its gradient scattered once a step.

    ``blocks`` and ``root`` are the shapes of the parameters of each unit; ``block_gathers`` and ``root_gathers`` how
    often a step gathers each: see ``gathers`` and ``pipelined_gathers``. With one micro-batch and freed blocks this is
    ZeRO stage 3's (2 gathers + 1 scatter) x parameters x (n - 1) / n (Rajbhandari et al. 2020, ZeRO, section 7.2.2);
    gradients of further micro-batches add up on each rank without communication.
    """
    units = [*zip(blocks, block_gathers, strict=True), (root, root_gathers)]
    return together(
        all_gather("shard", ranks, padded(unit, ranks) * element) * times
        + reduce_scatter("shard", ranks, padded(unit, ranks) * reduced_element)
        for unit, times in units
        if unit
    )


def gathers(micro_batches: int, *, freed_after_forward: bool) -> tuple[int, int]:
    """(of each block, of the root) in a step without a pipeline.

    All are freed after each backward pass. Blocks that are freed after the forward pass too are gathered twice; the
    root, whose last use in the forward is followed by its first in the backward pass, never is.
    """
    return micro_batches * (2 if freed_after_forward else 1), micro_batches


def pipelined_gathers(micro_batches: int, *, freed_after_forward: bool) -> tuple[int, int]:
    """(of each block, of the root) in a step of GPipe or 1F1B.

    torch's pipelining frees nothing after a backward pass until the step ends. So what is never freed after a forward
    pass is gathered once a step. A block that is, is gathered by every forward that does not follow a backward, and by
    every backward that follows a forward: on any rank of 1F1B, with w forwards ahead, w + 1 and m - w times.
    (GPipe: m forwards and the first backward.)
    """
    return (micro_batches + 1 if freed_after_forward else 1), 1


def replicated(units: Iterable[Sequence[Shape]], *, replicas: int, ranks: int, reduced_element: int) -> Traffic:
    """DDP and HSDP: a rank's piece of each unit's gradient is all-reduced over the replicas, once a step.

    ``ranks`` share a replica (1: DDP, 2 (n - 1) / n x gradients: Li et al. 2020, PyTorch Distributed, section 2.3).
    """
    return together(
        all_reduce("dp_replicate", replicas, padded(unit, ranks) // ranks * reduced_element) for unit in units if unit
    )


# Tensor parallelism


def tensor_parallel_regions(
    regions: int, *, tp: int, activations: int, element: int, micro_batches: int, sequence: bool, recomputed: int = 0
) -> Traffic:
    """Regions of column and row divisions: attention and feed-forward are one each.

    A region sums its ``activations`` (batch x tokens x width) over ranks where it is left in the forward pass, and
    their gradients where it is entered: 2 all-reduces, 4 a block (Shoeybi et al. 2019, Megatron-LM, section 3). With
    sequence parallelism an all-gather where it is entered and a reduce-scatter where it is left, and the reverse in the
    backward pass: 2 + 2, 4 + 4 a block, the same bytes (Korthikanti et al. 2022, section 4.2.2).

    ``recomputed``: blocks of two regions that full activation checkpointing runs again. They repeat all but the sum at
    their end, which nothing within the block needs: 1 all-reduce, or 2 all-gathers and 1 reduce-scatter.
    """
    whole = activations * element
    if sequence:
        gather, scatter = all_gather("tp", tp, whole), reduce_scatter("tp", tp, whole)
        return ((gather + scatter) * (2 * regions) + (gather * 2 + scatter) * recomputed) * micro_batches
    return all_reduce("tp", tp, whole) * ((2 * regions + recomputed) * micro_batches)


def split_tokens(
    *, tp: int, activations: int, element: int, micro_batches: int, begins: bool = True, ends: bool = True
) -> Traffic:
    """Where sequence parallelism begins and ends: tokens are gathered after the last block, their gradients after the
    backward pass of the first. ``begins``, ``ends``: whether a rank of a pipeline has these blocks."""
    return all_gather("tp", tp, activations * element) * ((begins + ends) * micro_batches)


def vocabulary_parallel(
    *,
    tp: int,
    activations: int,
    tokens: int,
    element: int,
    micro_batches: int,
    embedding: bool = True,
    head: bool = True,
) -> Traffic:
    """Embedding and head divided over the vocabulary, logits never gathered (Megatron-LM, section 3).

    The embedding's rows are summed forward, the gradient of the head's input backward. The loss takes the largest logit
    of each token, then two sums, in float32: 3 numbers a token in 2 all-reduces, for any vocabulary.
    """
    whole = all_reduce("tp", tp, activations * element)
    loss = all_reduce("tp", tp, tokens * 4) + all_reduce("tp", tp, 2 * tokens * 4)
    return (whole * (embedding + head) + (loss if head else Traffic())) * micro_batches


def partial_gradients(shapes: Iterable[Shape], *, tp: int, element: int) -> Traffic:
    """Parameters that every rank holds whole and uses on its own heads or tokens: gradients are summed, once a step."""
    return together(all_reduce("tp", tp, math.prod(shape) * element) for shape in shapes)


# Context parallelism


def ulysses(
    *,
    ranks: int,
    batch: int,
    tokens: int,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    element: int,
    layers: int,
    micro_batches: int,
) -> Traffic:
    """All-to-all over heads; ``tokens`` are those of a rank.

    Queries, keys and values go in one exchange, the output in another, and their gradients the same ways back, each
    but for the 1/U that stays: (2 Hq + 2 lcm(Hk, U)) B (S/U) D e (U - 1)/U each way (Jacobs et al. 2023, DeepSpeed
    Ulysses, section 3.2, there for Hk = Hq). Fewer key heads than ranks are repeated to lcm(Hk, U).
    """
    token = batch * tokens * head_dim * element
    keys = 2 * math.lcm(key_heads, ranks)
    leaving = Fraction(ranks - 1, ranks)
    to_heads = all_to_all("cp_ulysses", ranks, (query_heads + keys) * token * leaving)
    to_tokens = all_to_all("cp_ulysses", ranks, query_heads * token * leaving)
    return (to_heads + to_tokens) * (2 * layers * micro_batches)


def ring(
    *,
    ranks: int,
    batch: int,
    tokens: int,
    key_heads: int,
    head_dim: int,
    element: int,
    layers: int,
    micro_batches: int,
    forwards: int = 1,
) -> Traffic:
    """Keys and values go round the ring; ``tokens`` are those of a rank, k the bytes of its keys and values.

    Forward (n - 1) k. Backward (n - 1) k again, for nothing but a rank's own are kept, and their gradients in float32
    all the way home: n k 4/e (Liu et al. 2023, Ring Attention, arXiv 2310.01889). ``forwards``: 2 where activation
    checkpointing runs them again.
    """
    elements = 2 * batch * tokens * key_heads * head_dim
    around = all_to_all("cp_ring", ranks, elements * element) * ((forwards + 1) * (ranks - 1))
    home = all_to_all("cp_ring", ranks, elements * 4) * ranks
    return (around + home) * (layers * micro_batches)


def gathered_output(axis: str, *, ranks: int, elements: int, element: int, micro_batches: int) -> Traffic:
    """A denoiser's velocity, gathered along one axis once a forward pass; ``elements`` after it.

    In the backward pass each rank takes its part of what all have.
    """
    return all_gather(axis, ranks, elements * element) * micro_batches


# Pipeline parallelism


def pipeline(
    *, rank_of: Sequence[int], rank: int, activations: Sequence[int], element: int, micro_batches: int
) -> Traffic:
    """What travels over each cut, once forward and once back as gradients, for every micro-batch.

    ``rank_of`` stage s; ``activations``: elements of each tensor that travels, those of a rank's own tokens under
    context parallelism and under sequence parallelism. A cut between two stages of one rank costs nothing (V-shaped
    schedules have one). Under tensor parallelism alone each rank sends the whole tensor. (Megatron-LM sends 1/t and
    gathers it on the other side: Narayanan et al. 2021, section 4.1.)
    """
    sent = 0
    for stage, owner in enumerate(rank_of):
        if owner == rank:
            neighbours = [n for n in (stage - 1, stage + 1) if 0 <= n < len(rank_of)]
            sent += sum(rank_of[n] != rank for n in neighbours)
    return together(send("pp", size * element) for size in activations) * (sent * micro_batches)


def tied_weight(*, owns: bool, uses: bool, elements: int, element: int) -> Traffic:
    """A parameter that a first and a last stage share: its gradient goes to the owner, its new value to the user.

    ``elements`` of a rank's shard, in the master dtype, once a step whatever the number of micro-batches.
    """
    return send("pp", elements * element) if owns != uses else Traffic()


# Expert parallelism


def expert_parallel(
    *, ep: int, experts: int, rows_out: int, rows_in: int, width: int, element: int, layers: int, micro_batches: int
) -> Traffic:
    """Dispatch and combine, given the routing: rows (pairs of token and expert) that leave for and come from others.

    Forward, a rank dispatches ``rows_out`` rows of ``width`` and returns the results of ``rows_in``; backward, the
    gradients go the same ways back: 2 (out + in) rows, summed over layers and micro-batches (Lepikhin et al. 2020,
    GShard, section 3.2, there padded to a capacity; here exact). Before, each rank tells the others how many rows come
    for each of their experts, in int64.
    """
    counts = all_to_all("ep", ep, Fraction(experts * 8 * (ep - 1), ep)) * (layers * micro_batches)
    row = width * element
    messages = 4 * layers * micro_batches
    rows = all_to_all("ep", ep, 0) * (messages - 1) + all_to_all("ep", ep, 2 * (rows_out + rows_in) * row)
    return counts + rows


def even_rows(tokens: int, per_token: int, ep: int) -> Fraction:
    """Rows that leave a rank when its tokens choose all experts alike: T k (1 - 1/ep)."""
    return Fraction(tokens * per_token * (ep - 1), ep)


# The Trainer


def trainer(*, ranks: int, routed_layers: int = 0, experts: int = 0) -> Traffic:
    """Two small all-reduces in float64: eight counts before the passes, loss and squared gradient norm after them.

    With routers a third: of each layer two numbers an expert and four more.
    """
    sums = all_reduce("world", ranks, 8 * 8) + all_reduce("world", ranks, 2 * 8)
    if routed_layers:
        sums += all_reduce("world", ranks, routed_layers * (2 * experts + 4) * 8)
    return sums
