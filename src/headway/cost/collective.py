"""Collectives and point-to-point transfers over a cluster's links.

Within one level, by NCCL's ring: ``t = startup + hop · steps + ramp · min(1, B/B0) + passes·(n-1)/n · B / beta``,
where ``beta = link · e · (1 - few/n)`` for n ranks, steps and passes are doubled for an all-reduce, and B is the
whole tensor. Across levels the ring is one: its latencies add up, its bandwidth is that of the narrowest level, where
the g ranks of a group in one domain use their g network interfaces together. An all-reduce goes up and down a tree
between domains, in 2·log2 hops. Where the switch can sum (NVLS), an all-reduce takes the better way. Numbers:
``headway.cluster`` (achieved.toml), from nccl-tests on A100, H100, H200, B200, GB200 and GB300.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster import Group, Level, Rate
from headway.cost.estimate import Estimate, Number, numbers

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]

LATENCY_RANGE = (0.7, 1.4)
"""Latencies move by this much between NCCL versions and sizes."""
ARRIVAL_US = (50.0, 15.0, 110.0)
"""Standard deviation, with its range, of when the ranks of a group reach a collective in training: clocks and launches
differ (no direct measurement was found; small all-reduces of Megatron's tensor parallelism over 8 ranks take 200 us and
more where nccl-tests take 25)."""
PEER_US = 0.2
"""What an all-to-all pays for each further peer."""


def collective(kind: Collective, bytes_of_tensor: ArrayLike, group: Group, sharing: float = 1.0) -> Estimate:
    """Time of a collective in ns once all ranks have arrived, launch not included.

    ``bytes_of_tensor``: of the whole tensor: an all-gather's result, a reduce-scatter's input, what one rank sends to
    all others and itself in an all-to-all, the message of a send_recv. ``sharing``: how many collectives use the
    links between domains at the same time: 2 halves their bandwidth. A group of one costs nothing.
    """
    size = numbers(bytes_of_tensor)
    if group.size == 1:
        return Estimate.exactly(0.0 * size)
    if kind == "all_to_all":
        return _all_to_all(size, group, sharing)
    if kind == "send_recv":
        return _send_recv(size, group, sharing)
    ring = _latency(kind, size, group) + _ring_transfer(kind, size, group, sharing)
    used = group.used()
    if kind == "all_reduce" and len(used) == 1:
        return _with_switch(ring, size, used[0][0], group.size)
    return ring


def arrival(ranks: ArrayLike) -> Estimate:
    """How long the mean rank of a group waits for the last one, in ns: sqrt(2 ln n) standard deviations of a normal."""
    deviations = 1e3 * np.sqrt(2 * np.log(np.maximum(1, numbers(ranks))))
    return Estimate(*(deviations * microseconds for microseconds in ARRIVAL_US))


def _ring_transfer(kind: Collective, size: Number, group: Group, sharing: float) -> Estimate:
    """The tensor's way around the ring, at the narrowest level's rate."""
    passes = {"all_reduce": 2.0, "broadcast": group.size / (group.size - 1)}.get(kind, 1.0)
    crossing = passes * (group.size - 1) / group.size * size
    slowest = Estimate.exactly(0.0 * size)
    for level, ranks, parts in group.used():
        interfaces = ranks // parts
        bandwidth = _bandwidth(level, parts, group, sharing) * interfaces
        slowest = slowest.later(_transfer(crossing, bandwidth, _efficiency(level, kind, level.achieved.efficiency)))
    return slowest


def _bandwidth(level: Level, parts: int, group: Group, sharing: float) -> float:
    """GB/s of one device's links on a level, before what is achieved of it."""
    if group.is_innermost(level):
        return level.gb_per_s_unidirectional * _ring_share(level, parts) / level.oversubscription
    lost = level.achieved.loss_per_doubling * np.log2(parts) / level.achieved.efficiency.value
    return level.gb_per_s_unidirectional * float(max(0.1, 1 - lost)) / level.oversubscription / sharing


def _ring_share(level: Level, ranks: int) -> float:
    """The share of a device's links that a ring of ``ranks`` uses."""
    match level.topology:
        case "mesh":
            return (ranks - 1) / (level.devices - 1)
        case "bus":  # all flows share the host's root; a ring of more than two crosses its sockets
            return 2 / ranks * (0.5 if ranks > 2 else 1.0)
        case "switch":
            return 1 - level.achieved.few_ranks / ranks


def _latency(kind: Collective, size: Number, group: Group) -> Estimate:
    microseconds = 0.0 * size
    for level, ranks, parts in group.used():
        achieved = level.achieved
        if kind != "all_reduce":
            hops = float((parts - 1) * (group.size // ranks))
        else:
            hops = 2 * (parts - 1) if group.is_innermost(level) else 2 * float(np.ceil(np.log2(parts)))
        startup = _startup_us(level, kind, achieved.startup_us)
        microseconds = microseconds + startup + achieved.hop_us * hops + _ramp_us(level, size)
    return _ranged(1e3 * microseconds)


def _with_switch(ring: Estimate, size: Number, level: Level, ranks: int) -> Estimate:
    """The better of the ring and of sums in the switch, through which the tensor passes once up and once down."""
    achieved = level.achieved
    if achieved.in_network_efficiency is None or ranks < achieved.in_network_from:
        return ring
    microseconds = achieved.startup_us + 2 * (ranks - 1) * achieved.hop_us + _ramp_us(level, size)
    transfer = _transfer(size, level.gb_per_s_unidirectional, achieved.in_network_efficiency)
    return ring.sooner(transfer + _ranged(1e3 * microseconds))


def _all_to_all(size: Number, group: Group, sharing: float) -> Estimate:
    """Each rank's parts for the ranks of each level, all levels at once: the slowest counts."""
    slowest, startup = Estimate.exactly(0.0 * size), 0.0 * size
    for level, ranks, parts in group.used():
        leaving = size * (ranks - ranks // parts) / group.size
        bandwidth = _bandwidth(level, parts, group, sharing)
        efficiency = _efficiency(level, "all_to_all", level.achieved.all_to_all_efficiency)
        slowest = slowest.later(_transfer(leaving, bandwidth, efficiency))
        begins = _startup_us(level, "all_to_all", level.achieved.all_to_all_startup_us)
        startup = np.maximum(startup, begins + _ramp_us(level, size))
    return slowest + _ranged(1e3 * (startup + PEER_US * (group.size - 1)))


def _send_recv(size: Number, group: Group, sharing: float) -> Estimate:
    """A message to the next rank of the group, over the outermost level that the group crosses."""
    level = group.used()[-1][0]
    efficiency = _efficiency(level, "send_recv", level.achieved.efficiency)
    startup = _startup_us(level, "send_recv", level.achieved.startup_us)
    transfer = _transfer(size, _bandwidth(level, 2, group, sharing), efficiency)
    return transfer + _ranged(1e3 * (startup + level.achieved.hop_us) + 0.0 * size)


def _efficiency(level: Level, kind: Collective, usual: Rate) -> Rate:
    own = level.achieved.kinds.get(kind)
    return usual if own is None else own.efficiency


def _startup_us(level: Level, kind: Collective, usual: float) -> float:
    own = level.achieved.kinds.get(kind)
    return usual if own is None else own.startup_us


def _transfer(size: Number, gb_per_s: float, efficiency: Rate) -> Estimate:
    nanoseconds = size / gb_per_s
    return Estimate(nanoseconds / efficiency.value, nanoseconds / efficiency.high, nanoseconds / efficiency.low)


def _ramp_us(level: Level, size: Number) -> Number:
    ramp: Number = level.achieved.ramp_us * np.minimum(1, size / (level.achieved.ramp_megabytes * 1e6))
    return ramp


def _ranged(nanoseconds: Number) -> Estimate:
    return Estimate(nanoseconds, nanoseconds * LATENCY_RANGE[0], nanoseconds * LATENCY_RANGE[1])
