"""What a rehearsed step comes to: time, memory, throughput, where the time goes, and what it was spent on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from headway.cluster import Cluster
from headway.rehearse.columns import Flags, Integers
from headway.rehearse.memory import GIB, Memory, memory_of
from headway.rehearse.predicted_timeline import timeline_of
from headway.rehearse.program import Program, program_of
from headway.rehearse.record import Allocation, Facts, Record
from headway.rehearse.simulate import Ranged, RankTimes, Simulation, simulate
from headway.timeline import DEVICE_KINDS, Intervals, Kind, Timeline, attributed_ns


@dataclass(frozen=True)
class Shares:
    """Where the time of a step goes, in seconds: the mean of the ranks. All together are the step.

    Communication counts where nothing computes. What is left when the device does nothing is the host's where the next
    thing to run had just been launched, and otherwise the pipeline's: waiting for other stages.
    """

    compute: float
    """Forward and backward passes."""
    recompute: float
    optimizer: float
    """With clipping, averages and all else outside of the passes."""
    exposed_communication: dict[str, float]
    """By mesh axis."""
    copies: float
    bubble: float
    host: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.recompute, self.optimizer, self.copies, self.bubble, self.host)
        return sum(parts) + sum(self.exposed_communication.values())

    def named(self) -> list[tuple[str, float]]:
        """The parts by the names that people read, in seconds; those that are nothing left out."""
        parts = [("compute", self.compute), ("recompute", self.recompute), ("optimizer and norms", self.optimizer)]
        parts += [(f"communication {axis}", seconds) for axis, seconds in self.exposed_communication.items()]
        parts += [("copies", self.copies), ("pipeline bubble", self.bubble), ("host", self.host)]
        return [(name, seconds) for name, seconds in parts if seconds > 0]

    def as_json(self) -> dict[str, Any]:
        """As commands write it."""
        return {
            "compute_s": self.compute,
            "recompute_s": self.recompute,
            "optimizer_s": self.optimizer,
            "exposed_communication_s": self.exposed_communication,
            "copies_s": self.copies,
            "bubble_s": self.bubble,
            "host_s": self.host,
        }


@dataclass(frozen=True)
class Prediction:
    """Of one recipe on one cluster."""

    cluster: Cluster
    simulation: Simulation
    """Of one rank of each pipeline place."""
    memories: tuple[Memory, ...]
    """Of the same ranks."""

    @property
    def facts(self) -> Facts:
        """What the step is of, on the first rank."""
        return self.simulation.ranks[0].program.facts

    @cached_property
    def timeline(self) -> Timeline:
        """All simulated ranks."""
        return timeline_of(self.simulation)

    @property
    def step_time_s(self) -> Ranged:
        """Seconds of a step."""
        return self.simulation.range_ns.scaled(1e-9)

    @property
    def memory(self) -> Memory:
        """Of the rank that comes nearest to its end, else of the one with the highest peak."""
        return max(self.memories, key=lambda memory: memory.needed.value)

    @property
    def out_of_memory_probability(self) -> float | None:
        """Of the rank whose is highest; None where memory is shared with others (the CPU)."""
        return max((one.out_of_memory_probability or 0.0 for one in self.memories if one.usable), default=None)

    @cached_property
    def shares(self) -> Shares:
        """Where the time goes."""
        return _mean([_shares(self.timeline, times, self.simulation.step_ns) for times in self.simulation.ranks])

    def as_json(self) -> dict[str, Any]:
        """The ``prediction`` of ``headway plan`` and ``headway rehearse``."""
        facts, seconds = self.facts, self.step_time_s.value
        tflops = facts.model_flops / facts.world / seconds / 1e12
        executed = (facts.model_flops + facts.recomputed_flops) / facts.world / seconds / 1e12
        peak = self.cluster.accelerator.peak_tflops(facts.compute_dtype)
        return {
            "step_time_s": self.step_time_s.as_json(),
            "peak_memory_gib": self.memory.peak.scaled(1 / GIB).as_json(),
            "tokens_per_s_per_device": facts.tokens / facts.world / seconds,
            "samples_per_s_per_device": facts.samples / facts.world / seconds,
            "tflops_per_device": tflops,
            "mfu": None if peak is None else tflops / peak,
            "hfu": None if peak is None else executed / peak,
            "oom_probability": self.out_of_memory_probability,
            "breakdown": self.shares.as_json(),
        }

    def result_json(self) -> dict[str, Any]:
        """The result of ``headway rehearse``."""
        memory = self.memory
        return {
            "cluster": self.cluster.name,
            "devices": self.facts.world,
            "simulated_ranks": [times.program.facts.rank for times in self.simulation.ranks],
            "prediction": self.as_json(),
            "breakdown": self.shares.as_json(),
            "errors_s": {source: [down / 1e9, up / 1e9] for source, (down, up) in self.simulation.errors_ns.items()},
            "memory": {
                "rank": memory.rank,
                "peak_gib": memory.peak_bytes / GIB,
                "reserved_gib": memory.reserved_bytes / GIB,
                "needed_gib": memory.needed.scaled(1 / GIB).as_json(),
                "usable_gib": None if memory.usable is None else memory.usable.scaled(1 / GIB).as_json(),
                "held_by": {holding.name: holding.bytes / GIB for holding in memory.categories},
                "held_by_module": {holding.name: holding.bytes / GIB for holding in memory.modules},
            },
            "operators": operators_table(self.timeline),
            "collectives": collectives_table(self.timeline, self.simulation),
        }


def predict(records: Iterable[Record], cluster: Cluster, *, expandable_segments: bool = False) -> Prediction:
    """Predict a step from the records of one rank of each pipeline place, in the order of the pipeline.

    Each record is done with before the next is asked for: they are large. Raises UserError when the cluster has too few
    devices or knows no rate of what is computed.
    """
    programs: list[Program] = []
    held: list[list[Allocation]] = []
    for record in records:
        programs.append(program_of(record, cluster))
        held.append(record.allocations)
    simulation = simulate(programs)
    memories = tuple(
        memory_of(allocations, times, cluster, expandable=expandable_segments)
        for allocations, times in zip(held, simulation.ranks, strict=True)
    )
    return Prediction(cluster, simulation, memories)


def operators_table(timeline: Timeline) -> list[dict[str, Any]]:
    """Kernels of all simulated ranks by name and phase, longest first: how often, how long, share of all kernels."""
    chosen = np.flatnonzero(timeline.kinds(Kind.COMPUTE, Kind.MEMORY))
    keys = np.stack([timeline.name[chosen], timeline.phase[chosen]])
    whole = max(int(timeline.duration_ns[chosen].sum()), 1)
    rows = []
    for (name, phase), here in _grouped(keys, chosen):
        time = int(timeline.duration_ns[here].sum())
        flops = int(timeline.flops[here].sum())
        rows.append(
            {
                "operator": timeline.strings[name],
                "phase": timeline.strings[phase],
                "count": len(here),
                "time_s": time / 1e9,
                "share": time / whole,
                "tflops_per_s": flops / time / 1e3 if time and flops else None,
                "gb_moved": int(timeline.bytes[here].sum()) / 1e9,
            }
        )
    return sorted(rows, key=lambda row: -row["time_s"])


def collectives_table(timeline: Timeline, simulation: Simulation) -> list[dict[str, Any]]:
    """Collectives of all simulated ranks by axis, kind and phase, those that cost most first.

    How often, bytes that a rank contributes, time, and time in which nothing computes.
    """
    sizes = {key: group.size for times in simulation.ranks for key, group in times.program.groups.items()}
    exposed = np.zeros(len(timeline), dtype=np.int64)
    for rank in timeline.ranks():
        exposed[timeline.rank == rank] = attributed_ns(timeline.of_rank(rank))
    chosen = np.flatnonzero(timeline.kinds(Kind.COMMUNICATION))
    keys = np.stack(
        [timeline.axis[chosen], timeline.collective[chosen], timeline.phase[chosen], timeline.group[chosen]]
    )
    whole = max(int(timeline.bytes[chosen].sum()), 1)
    rows = []
    for (axis, collective, phase, group), here in _grouped(keys, chosen):
        moved = int(timeline.bytes[here].sum())
        rows.append(
            {
                "axis": timeline.strings[axis],
                "collective": timeline.strings[collective],
                "phase": timeline.strings[phase],
                "ranks": sizes[timeline.strings[group]],
                "count": len(here),
                "gb": moved / 1e9,
                "share_of_bytes": moved / whole,
                "time_s": int(timeline.duration_ns[here].sum()) / 1e9,
                "exposed_s": int(exposed[here].sum()) / 1e9,
            }
        )
    return sorted(rows, key=lambda row: (-row["exposed_s"], -row["time_s"]))


def _grouped(keys: Any, chosen: Integers) -> list[tuple[tuple[int, ...], Integers]]:
    """Places ``chosen`` by their column of ``keys``."""
    found, which = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    stops = np.cumsum(np.bincount(which.ravel(), minlength=found.shape[1]))
    parts = np.split(chosen[order], stops[:-1]) if found.shape[1] else []
    return [(tuple(key), part) for key, part in zip(found.T.tolist(), parts, strict=True)]


def _shares(timeline: Timeline, times: RankTimes, step_ns: int) -> Shares:
    """Of one rank."""
    own = timeline.of_rank(times.program.facts.rank)
    window = (0, step_ns)
    seconds = attributed_ns(own, window) / 1e9
    computes = own.kinds(Kind.COMPUTE)
    recomputes = computes & own.matching("phase", ["recompute"])
    passes = computes & own.matching("phase", ["forward", "backward"])
    talks = own.kinds(Kind.COMMUNICATION)
    axes = {own.strings[axis]: float(seconds[talks & (own.axis == axis)].sum()) for axis in np.unique(own.axis[talks])}
    idle = own.intervals(own.kinds(*DEVICE_KINDS)).gaps_in(*window)
    hosts = _behind_host(idle, times, step_ns)
    return Shares(
        compute=float(seconds[passes].sum()),
        recompute=float(seconds[recomputes].sum()),
        optimizer=float(seconds[computes & ~passes & ~recomputes].sum()),
        exposed_communication=dict(sorted(axes.items())),
        copies=float(seconds[own.kinds(Kind.MEMORY)].sum()),
        bubble=(idle.total_ns() - hosts) / 1e9,
        host=hosts / 1e9,
    )


def _behind_host(idle: Intervals, times: RankTimes, step_ns: int) -> int:
    """How much of ``idle`` ends with an operator that starts as soon as it is launched, or with the host's own work."""
    begun = times.program.durations.launched
    late: Flags = begun & (times.start_ns == times.issued_ns)
    ends = np.isin(idle.ends, times.start_ns[late])
    if times.host_end_ns == step_ns:
        ends |= idle.ends == step_ns
    return int((idle.ends - idle.starts)[ends].sum())


def _mean(shares: list[Shares]) -> Shares:
    axes = sorted({axis for share in shares for axis in share.exposed_communication})
    count = len(shares)
    return Shares(
        compute=sum(share.compute for share in shares) / count,
        recompute=sum(share.recompute for share in shares) / count,
        optimizer=sum(share.optimizer for share in shares) / count,
        exposed_communication={
            axis: sum(share.exposed_communication.get(axis, 0.0) for share in shares) / count for axis in axes
        },
        copies=sum(share.copies for share in shares) / count,
        bubble=sum(share.bubble for share in shares) / count,
        host=sum(share.host for share in shares) / count,
    )
