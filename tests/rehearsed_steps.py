"""Records of steps written by hand, and a cluster on which their times are round numbers."""

from dataclasses import replace

from headway.cluster import Cluster, cluster_named
from headway.rehearse.program import program_of
from headway.rehearse.record import (
    BEFORE,
    COMPUTE,
    Access,
    Allocation,
    Category,
    Collective,
    Facts,
    Group,
    HostRead,
    Operator,
    Phase,
    Record,
)
from headway.rehearse.simulate import Simulation, simulate


def exact_cluster(**host: float) -> Cluster:
    """An accelerator that moves one byte a ns; kernels and launches start at once; collectives move one byte a ns too.

    ``launch_us``: of the host; ``slowdown``: of compute beside communication.
    """
    known = cluster_named("dgx-h100").model_dump()
    known["name"] = "exact"
    known["accelerator"] |= {"memory_bandwidth_gb_per_s": 1.0}
    achieved = known["achieved"]
    achieved["memory"] |= {"startup_us": 0.0, "fraction": dict.fromkeys(achieved["memory"]["fraction"], 1.0)}
    achieved["host"]["operator_us"] = [host.get("launch_us", 1e-9)] * 3
    slowdown = host.get("slowdown", 0.0) or 1e-12
    achieved["compute_slowdown"] = [slowdown] * 3
    exact = {"startup_us": 0, "hop_us": 0, "ramp_us": 0, "efficiency": 1.0, "few_ranks": 0.0, "loss_per_doubling": 0}
    for level in known["levels"]:
        level["gb_per_s_unidirectional"] = 1.0
        level["achieved"] |= exact | {"in_network_efficiency": None}
    return Cluster.model_validate(known)


def played(records: list[Record], cluster: Cluster) -> Simulation:
    """``records`` on ``cluster``, without a range."""
    return simulate([program_of(record, cluster) for record in records], ranges=False)


class Step:
    """Writes the Record of one rank's step, one operator after the other."""

    def __init__(
        self,
        *,
        world: int = 1,
        rank: int = 0,
        pp: int = 1,
        groups: dict[str, Group] | None = None,
        compiled: bool = False,
    ) -> None:
        self.facts = Facts(
            rank=rank,
            world=world,
            sizes={"pp": pp, "dp_shard": world // pp},
            stages=(rank // (world // pp),),
            micro_batches=1,
            samples=8,
            tokens=1024,
            model_flops=10**12,
            recomputed_flops=0,
            parameters=10**6,
            trained_parameters=10**6,
            blocks={"blocks.0": "Block", "blocks.1": "Block"},
            block_stages={"blocks.0": 0, "blocks.1": 0},
            compiled=compiled,
            compute_dtype="bfloat16",
        )
        self.groups = groups or {}
        self.operators: list[Operator] = []
        self.allocations: list[Allocation] = []
        self.host_reads: list[HostRead] = []
        self._last: dict[str, int] = {}
        self._events = 0
        self._storages = 0

    def run(
        self,
        nanoseconds: int,
        lane: str = COMPUTE,
        after: tuple[int, ...] = (),
        *,
        phase: Phase = "forward",
        module: str = "blocks.0",
        reads: tuple[tuple[int, int], ...] | None = None,
        writes: tuple[tuple[int, int], ...] = (),
        fusible: bool = False,
        name: str = "aten.copy_.default",
        collective: Collective | None = None,
    ) -> int:
        """A kernel that takes ``nanoseconds`` on ``exact_cluster``; returns its number."""
        if reads is None:
            self._storages += 1
            reads = ((1000 + self._storages, nanoseconds),)
        before = (self._last[lane],) if lane in self._last else ()
        number = len(self.operators)
        self.operators.append(
            Operator(
                name=name,
                kind="pointwise" if collective is None else "collective",
                lane=lane,
                after=tuple(sorted({*after, *before})),
                phase=phase,
                module=module,
                block=".".join(module.split(".")[:2]),
                micro_batch=0,
                stage=0,
                flops=0,
                reads=tuple(Access(*access) for access in reads),
                writes=tuple(Access(*access) for access in writes),
                dtype="bfloat16",
                fusible=fusible,
                collective=collective,
            )
        )
        self._last[lane] = number
        return number

    def talk(
        self,
        kind: str,
        nanoseconds: int,
        group: str,
        lane: str,
        after: tuple[int, ...] = (),
        *,
        peer: int = -1,
        phase: Phase = "forward",
    ) -> int:
        """A collective or message that takes ``nanoseconds`` once all have arrived (an even number of ranks)."""
        size = nanoseconds
        if kind in ("all_gather", "reduce_scatter"):
            ranks = self.groups[group].size
            assert nanoseconds * ranks % (ranks - 1) == 0
            size = nanoseconds * ranks // (ranks - 1)
        call = Collective(kind, group, size, lane.startswith("comm"), peer)
        return self.run(0, lane, after, phase=phase, collective=call, name=f"c10d.{kind}", reads=((0, size),))

    def host_read(self, *after: int) -> None:
        """The host waits for operators before it issues the next."""
        self.host_reads.append(HostRead(len(self.operators), after, "step"))

    def allocate(self, size: int, category: Category = "activation", *, before: bool = False, module: str = "") -> int:
        """Memory from here on, or from before the step; returns its number."""
        event = BEFORE if before else self._events
        self._events += not before
        at = BEFORE if before else len(self.operators)
        self.allocations.append(
            Allocation(len(self.allocations), size, category, COMPUTE, module, at, -1, event, -1, True)
        )
        return len(self.allocations) - 1

    def free(self, allocation: int) -> None:
        """Free it here."""
        held = self.allocations[allocation]
        held.freed_at, held.freed_event, held.stays = len(self.operators), self._events, False
        self._events += 1

    def record(self) -> Record:
        """What was written."""
        for held in self.allocations:
            if held.stays:
                held.freed_at, held.freed_event = len(self.operators), self._events
        ordered = sorted(self.allocations, key=lambda held: held.allocated_event)
        return Record(replace(self.facts), self.operators, ordered, self.groups, self.host_reads)
