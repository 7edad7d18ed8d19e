"""What communication of each axis a block and a step need, before anything hides it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.cost import Estimate, arrival
from headway.plan.behaviour import Behaviour
from headway.plan.block_time import Settings
from headway.plan.layout import Column, Layouts, collective_in
from headway.plan.shape import Block


@dataclass(frozen=True)
class BlockCommunication:
    """One layer of a micro-batch, one direction: times and how many collectives the host launches."""

    tensor: Estimate
    context: Estimate
    expert: Estimate
    collectives: Column


def block_communication(
    cluster: Cluster,
    hidden: int,
    block: Block,
    layouts: Layouts,
    settings: Settings,
    behaviour: Behaviour,
    backward: bool,
) -> BlockCommunication:
    """Time of a layer's collectives in the forward or the backward pass."""
    tokens = layouts.micro_batch * settings.sequence / layouts.cp
    halves = (1 if block.attention or block.state_space else 0) + (1 if block.mlp_width or block.experts else 0)
    halves += 1 if block.attention and block.attention.cross_tokens else 0
    return BlockCommunication(
        tensor=_tensor(cluster, hidden, halves, tokens, layouts, backward),
        context=_context(cluster, block, tokens, layouts, behaviour, backward),
        expert=_expert(cluster, hidden, block, tokens, layouts, behaviour),
        collectives=_launches(block, halves, layouts),
    )


def _tensor(cluster: Cluster, hidden: int, halves: int, tokens: Column, layouts: Layouts, backward: bool) -> Estimate:
    """Each half of a block (attention, MLP) gathers its input and reduces its output, or reduces it to all.

    Backwards with sequence parallelism the input is gathered once more, for the weight gradient.
    """
    size, stride = 2.0 * tokens * hidden, np.ones(len(layouts))
    split = collective_in(cluster, "all_gather", size, layouts.tp, stride) * (2.0 if backward else 1.0)
    split = split + collective_in(cluster, "reduce_scatter", size, layouts.tp, stride)
    whole = collective_in(cluster, "all_reduce", size, layouts.tp, stride)
    waits = arrival(layouts.tp) * np.where(layouts.sequence_parallel > 0, 3.0 if backward else 2.0, 1.0)
    return halves * (_where(layouts.sequence_parallel > 0, split, whole) + waits)


def _context(
    cluster: Cluster, block: Block, tokens: Column, layouts: Layouts, behaviour: Behaviour, backward: bool
) -> Estimate:
    """Keys and values go round (cp - 1 messages), or are gathered; backwards their gradients go too."""
    if not block.attention or np.all(layouts.cp == 1):
        return Estimate.exactly(np.zeros(len(layouts)))
    shape = block.attention
    heads = shape.kv_heads if not shape.kv_rank else shape.heads
    own = 2.0 * tokens * np.maximum(1, heads / layouts.tp) * (shape.head_size + shape.value_size)
    if behaviour.context_gathers:
        time = collective_in(cluster, "all_gather", own * layouts.cp, layouts.cp, layouts.tp)
        back = collective_in(cluster, "reduce_scatter", own * layouts.cp, layouts.cp, layouts.tp)
        return time + back if backward else time
    messages = (layouts.cp - 1) * (2.0 if backward else 1.0)
    return messages * collective_in(cluster, "send_recv", own, layouts.cp, layouts.tp)


def _expert(
    cluster: Cluster, hidden: int, block: Block, tokens: Column, layouts: Layouts, behaviour: Behaviour
) -> Estimate:
    """Tokens go to their experts' ranks and come back: two all-to-alls."""
    nothing = Estimate.exactly(np.zeros(len(layouts)))
    if not block.experts or np.all((layouts.ep == 1) & (layouts.etp == 1)):
        return nothing
    width = block.experts.latent or hidden
    sent = tokens / layouts.tp * width * 2.0
    chosen = float(block.experts.chosen)
    copies = np.full(len(layouts), chosen)
    if behaviour.expert_deduplicates:
        domains = layouts.ep / np.minimum(layouts.ep, np.maximum(1, _domain(cluster) / layouts.etp))
        parts = np.where(domains > 1, domains, layouts.ep)
        copies = parts * (1 - (1 - 1 / parts) ** chosen)
        if block.experts.most_nodes:
            copies = np.where(domains > 1, np.minimum(copies, block.experts.most_nodes), copies)
    time = 2.0 * collective_in(cluster, "all_to_all", sent * copies, layouts.ep, layouts.etp)
    if np.any(layouts.etp > 1):
        gathered = sent * chosen * layouts.etp
        stride = np.ones(len(layouts))
        time = time + collective_in(cluster, "all_gather", gathered, layouts.etp, stride)
        time = time + collective_in(cluster, "reduce_scatter", gathered, layouts.etp, stride)
    return time * behaviour.expert_imbalance + 2.0 * arrival(layouts.ep * layouts.etp)


def _domain(cluster: Cluster) -> float:
    """Devices within the innermost level of links."""
    return float(cluster.levels[0].devices) if cluster.levels else 1.0


def _launches(block: Block, halves: int, layouts: Layouts) -> Column:
    each = np.where(layouts.sequence_parallel > 0, 2.0, 1.0) * halves
    count = np.where(layouts.tp > 1, each, 0.0)
    count = count + np.where(layouts.cp > 1, layouts.cp - 1, 0.0)
    return count + (np.where(layouts.ep > 1, 2.0, 0.0) if block.experts else 0.0)


def _where(chosen: NDArray[np.bool_], first: Estimate, second: Estimate) -> Estimate:
    return Estimate(
        np.where(chosen, first.value, second.value),
        np.where(chosen, first.low, second.low),
        np.where(chosen, first.high, second.high),
    )
