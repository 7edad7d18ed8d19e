"""What one rank does in one training step, as plain data: operators, collectives, memory and waits of the host.

A Record says what happens and what must happen before what. It knows no times and no cluster: those come from a cost
model. Numbers of operators are places in ``Record.operators``, which stand in the order in which the host issued them;
since an operator can wait only for what was issued before it, that order is also a topological one.
"""

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "recompute", "backward", "optimizer", "other"]
"""``optimizer``: update, gradient clipping and averages of weights; ``other``: votes, gradient norm, what else is
outside of the passes."""
OperatorKind = Literal[
    "product", "attention", "pointwise", "activation", "normalisation", "softmax", "cast", "permute", "optimizer",
    "collective",
]  # fmt: skip
"""How an operator is charged: ``product`` and ``attention`` by their ``work``, ``collective`` by its ``collective``,
the others by ``bytes_moved`` (the names of ``cluster``'s kinds of memory-bound operators)."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"]
Category = Literal[
    "parameter",
    "frozen",
    "gradient",
    "optimizer",
    "ema",
    "batch",
    "activation",
    "recomputed",
    "gathered",
    "communication",
    "temporary",
]
"""What memory is held for. ``parameter``: shards of master weights (on one rank also the copies that are computed
with); ``frozen``: whole frozen parts and the model's buffers; ``gradient``: shards, and unreduced sums of accumulation;
``activation``: made by a forward pass and still there when its backward pass begins; ``recomputed``: made again by
activation checkpointing; ``gathered``: parameters that FSDP2 has gathered; ``communication``: buffers that collectives
read or write; ``temporary``: everything else."""

COMPUTE = "compute"
"""The lane of the device's main stream."""
BEFORE = -1
"""In place of an operator's number: what was there before the step."""


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` matrix products of ``[m, k]`` and ``[k, n]``, a convolution included: as its implicit product."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    """Of the operands: ``bfloat16``, ``float32``, …"""
    groups: int = 1
    """More than 1: one kernel over this many experts, which share the ``m`` rows (about ``m / groups`` each)."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One pass of fused attention."""

    batch: int
    heads: int
    """Of the queries."""
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    value_head_size: int
    causal: bool
    masked: bool
    """Whether a mask tensor is given: a kernel then skips nothing."""
    backward: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate with each other: one communicator, which runs one collective after the other."""

    axis: str
    """Mesh axis: ``shard``, ``dp_replicate``, ``tp``, ``pp``, ``cp_ring``, ``cp_ulysses``, ``expert_shard``, ``ep``, or
    ``world``."""
    ranks: tuple[int, ...]
    """Global ranks, this one among them."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, or one side of a message."""

    kind: CollectiveKind
    group: str
    """Key of ``Record.groups``."""
    bytes: int
    """Of the whole tensor, as ``headway.cost.collective`` takes it: an all-gather's result, a reduce-scatter's input,
    what one rank sends to all in an all-to-all, the message of a send or recv."""
    asynchronous: bool
    """Whether the issuing lane goes on at once; else it waits for the result."""
    peer: int = -1
    """Global rank on the other side of a send or recv."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a storage that an operator reads or writes."""

    storage: int
    """Serial number of the storage in this record."""
    bytes: int


@dataclass(slots=True)
class Operator:
    """A kernel, or a collective. Views, allocations and questions to the host are none."""

    name: str
    """As torch spells it: ``aten.mm.default``."""
    kind: OperatorKind
    lane: str
    """A stream: ``compute``, those of FSDP2 (``fsdp copy-in``, ``fsdp all-gather``, ``fsdp reduce-scatter``, ``fsdp
    all-reduce``), or ``comm AXIS`` of asynchronous collectives. What is on one lane runs in the order of the record."""
    after: tuple[int, ...]
    """Operators that must have ended before this one begins, the one before it on its lane included; ascending."""
    phase: Phase
    module: str
    """Path of the module, as ``named_modules`` of the trained model spells it (without wrappers); of a backward
    operator: of the forward operator that it differentiates. ``""``: none."""
    block: str
    """Path of the repeated block that ``module`` is in; ``""``: none."""
    micro_batch: int
    """Which of the step's micro-batches of this rank; -1: none."""
    stage: int
    """Which stage of the whole pipeline (0 without one); -1: none."""
    flops: int
    """By the convention of ``headway.train.flops``: scores that fused attention's backward computes again not counted,
    causal attention counted whole."""
    reads: tuple[Access, ...]
    """An access for each tensor read, in the order of the arguments; what is changed in place is read and written."""
    writes: tuple[Access, ...]
    dtype: str
    """Of the first result: ``bfloat16``, ``float32``, …"""
    fusible: bool
    """Whether a compiler would make one kernel of it and its neighbours: pointwise operators, casts, norms, sums."""
    work: Product | Attention | None = None
    """Of products and attention."""
    collective: Collective | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of all inputs."""
        return sum(access.bytes for access in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of all results."""
        return sum(access.bytes for access in self.writes)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(slots=True)
class Allocation:
    """Memory held for a while. A storage that is freed and filled again (FSDP2 does so) has several in a row."""

    storage: int
    """Serial number, as in ``Access``."""
    bytes: int
    """Asked for; not rounded."""
    category: Category
    lane: str
    """The stream that was current when it was asked for: a caching allocator reuses it there first."""
    module: str
    """Of parameters, gradients, optimizer states and averages: name of the parameter; else of the module at work."""
    allocated_at: int
    """Number of the operator that was issued next, or that made it; ``BEFORE``: there when the step begins."""
    freed_at: int
    """Number of the operator that was issued next after it was freed: it is held while operators ``allocated_at`` to
    ``freed_at - 1`` are issued. ``len(Record.operators)``: freed at the end of the step, or still there after it
    (``stays``)."""
    allocated_event: int
    """Place among all allocations and frees of the step in the order of the host, counted from 0; ``BEFORE``."""
    freed_event: int
    """As ``allocated_event``; of one that stays: after all others."""
    stays: bool
    """Whether it is still there after the step."""


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host waits for the device before it issues what comes next."""

    before: int
    """Number of the operator that is issued next."""
    after: tuple[int, ...]
    """Operators that the host waits for."""
    reason: str
    """``step`` for loss, norm and votes; ``experts`` for the rows of an exchange."""


@dataclass(frozen=True, slots=True)
class StageAction:
    """A pass of one micro-batch through one stage on this rank, in the order in which the host issued them."""

    kind: Literal["forward", "backward", "backward_input", "backward_weight"]
    stage: int
    micro_batch: int
    first: int
    """Number of its first operator."""
    stop: int
    """One past its last operator."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What is done for one micro-batch, or once: a part of a record of few micro-batches that one of many repeats.

    ``events`` are counted as in Allocation, storages numbered as in Access.
    """

    kind: str
    """``forward``, ``backward`` and others: see ``scenes.py``."""
    stage: int
    micro_batch: int
    """-1: of none."""
    first: int
    """Number of its first operator."""
    stop: int
    """One past its last operator."""
    first_event: int
    stop_event: int
    takes: tuple[int, ...]
    """Storages that it is handed, by whom calls it."""
    gives: tuple[int, ...]
    """Storages that it hands back."""

    @property
    def label(self) -> tuple[str, int, int]:
        """Kind, stage and micro-batch."""
        return self.kind, self.stage, self.micro_batch


@dataclass(frozen=True)
class Facts:
    """What a record is of."""

    rank: int
    world: int
    sizes: dict[str, int]
    """Ranks of each axis: pp, dp_replicate, dp_shard, cp_ring, cp_ulysses, tp, ep."""
    stages: tuple[int, ...]
    """Stages of the pipeline on this rank; (0,) without one."""
    micro_batches: int
    """Of this rank and step."""
    samples: int
    """Of the global batch."""
    tokens: int
    """That the model sees of the global batch, padding included."""
    model_flops: int
    """Forward and backward of the global batch on all ranks together, as the Trainer counts them."""
    recomputed_flops: int
    """What activation checkpointing adds, likewise."""
    parameters: int
    """Elements of the whole model's parameters."""
    trained_parameters: int
    blocks: dict[str, str]
    """Path of each repeated block that this rank has -> its class, in the order of the model."""
    block_stages: dict[str, int]
    """Path of each of those blocks -> the stage that it is on."""
    compiled: bool
    """Whether blocks are compiled: the record is of the eager program all the same."""
    compute_dtype: str


@dataclass
class Record:
    """One step of one rank: the second or any later one (optimizer states exist)."""

    facts: Facts
    operators: list[Operator]
    allocations: list[Allocation]
    """In the order of ``allocated_event``; what was there before comes first."""
    groups: dict[str, Group]
    host_reads: list[HostRead]
    actions: list[StageAction] = field(default_factory=list)
    """Empty without a pipeline."""
    segments: list[Segment] = field(default_factory=list)
    """Empty but for what is to be extended to more micro-batches."""

    def collectives(self) -> list[Operator]:
        """The operators that communicate."""
        return [operator for operator in self.operators if operator.collective is not None]

    def waiters(self) -> dict[int, int]:
        """Collective -> the first operator on another lane that waits for it, both by number."""
        found: dict[int, int] = {}
        for number, operator in enumerate(self.operators):
            for earlier in operator.after:
                before = self.operators[earlier]
                if before.collective is not None and before.lane != operator.lane:
                    found.setdefault(earlier, number)
        return found

    def peak_bytes(self) -> int:
        """Most bytes held at once, nothing rounded and nothing lost to an allocator."""
        events = [(a.allocated_event, a.bytes) for a in self.allocations if a.allocated_event != BEFORE]
        events += [(a.freed_event, -a.bytes) for a in self.allocations if not a.stays]
        held = peak = sum(a.bytes for a in self.allocations if a.allocated_event == BEFORE)
        for _, change in sorted(events):
            held += change
            peak = max(peak, held)
        return peak
