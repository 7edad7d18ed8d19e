"""Time and memory of every candidate at once, from rehearsed blocks: columns in, columns out.

A step: ``m·(forward + backward) + bubble + rest of the data-parallel traffic + optimizer`` on the slowest rank of the
pipeline; traffic of sharding runs beside the passes, and what is longer than they are is exposed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.cost import Collective, Estimate, launch
from headway.plan.layout import collective_in
from headway.plan.parts import Parts, exposed
from headway.plan.rehearsed_blocks import PARTS, BlockWork
from headway.plan.search_space import CHECKPOINTING, Candidates
from headway.rehearse.memory import ALLOCATED_RANGE, COMMUNICATOR_BYTES, CONTEXT_BYTES, GIB, INTERPRETER_BYTES, USABLE
from headway.rehearse.program import CPU

Floats = NDArray[np.float64]
AT_ONCE = 20_000
"""Candidates whose columns are in memory together."""
LEFT_OUT = 0.10
"""Half of an 80 % range: what rehearsals leave out (6 %), and what adding up blocks does besides (judgement)."""
BUBBLE = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved_1f1b": 1.0,
    "interleaved_zero_bubble": 0.5,
    "zbv": 0.4,
    "dualpipev": 0.4,
}
"""Of the passes of the other ranks, divided by the stages a rank, what a rank waits: weights' gradients fill about a
third to a half of it (Qi et al. 2023, 2024; theirs are equal passes, these are not)."""
IN_STEADY_STATE = 0.25
"""Share of the messages between stages that a rank waits for when all are at work (judgement)."""
SELECTIVE_TENSOR = 0.5
"""Of tensor parallelism's traffic, gathers are made again under selective checkpointing, reductions are kept."""
ACTIVATION_RANGE = 0.08
"""Of activations, for what is at work beside them at the peak."""


@dataclass(frozen=True)
class Stage:
    """The slowest rank's passes, and memory of the first and the last rank; columns, one element a row."""

    passes: Floats
    """``[rows, value low high, forward backward, parts]``: ns, but for what is in ``entry``."""
    entry: Floats
    """As ``passes``: what comes before the blocks (text encoders, VAE, embedding), which is not shared by sequence."""
    sent: Floats
    """``[rows, context-parallel axes, forward backward, bytes messages]``: by ranks in groups of two."""
    blocks_forward: Floats
    """``[rows, value low high, parts]``: of the blocks alone, what checkpointing repeats."""
    launches: Floats
    """``[rows, forward backward]``."""
    kept: Floats
    """``[rows, checkpointing, first last]``: bytes of activations of a micro-batch."""
    largest_block: Floats
    """``[rows]``: bytes that a recomputed block has at work."""
    beside: Floats
    """``[rows, first last]``."""
    before: Floats
    message: Floats
    """``[rows]``."""
    gathered: Floats
    """``[rows, whole experts, slowest first last]``: bytes."""
    reduced: Floats
    blocks: Floats
    """``[rows]``: blocks of the slowest rank."""
    held: Floats
    """``[rows, first last]``: of all shards."""
    frozen: Floats
    step: Floats
    """``[rows, value low high]``: ns a byte of ``held``."""
    step_launches: Floats

    def of_samples(self, two: "Stage", rows: NDArray[np.int64], samples: Floats, shared_by: Floats) -> "Stage":
        """``rows``, of so many samples each, from this (one sample) and ``two`` (two).

        ``shared_by``: ranks that share each sample; each has its part of the blocks' work.
        """
        found = {}
        for name, values in self.__dict__.items():
            own, more = values[rows], getattr(two, name)[rows]
            part = samples if name in ("entry", "before") else samples / shared_by
            share = (part - 1).reshape((-1,) + (1,) * (own.ndim - 1))
            found[name] = np.maximum(own + share * (more - own), 0.0)
        return Stage(**found)


def stage_of(work: BlockWork, counts: Floats, sent: Floats) -> Stage:
    """One row: ``work`` on a pipeline whose ranks have ``counts`` of its places; ``sent``: see BlockWork."""
    blocks = counts.copy()
    blocks[:, -2:] = 0
    passes = work.times @ counts.T  # [ends, passes, parts, ranks]
    total = passes[0].sum((0, 1))
    slowest, places = int(np.argmax(total)), [0, len(counts) - 1]
    inner, ends = blocks @ work.activations, (counts - blocks) @ work.activations
    by_mode = {
        "none": inner,
        "selective": np.minimum(blocks @ work.kept_selectively, inner),
        "full": np.minimum(blocks.sum(1) * work.message, inner),
    }
    kept = np.array([[(by_mode[name] + ends)[rank] for rank in places] for name in CHECKPOINTING])
    which = [slowest, *places]
    whole, experts = counts @ work.gathered, counts @ work.gathered_experts
    back, back_experts = counts @ work.reduced, counts @ work.reduced_experts
    first, last = (1.0, 1.0) if len(counts) == 1 else (0.6, 1.0)
    rows = {
        "passes": passes[..., slowest] - work.times[..., -2] * counts[slowest, -2],
        "entry": work.times[..., -2] * counts[slowest, -2],
        "sent": sent @ counts[slowest],
        "blocks_forward": (work.times[:, 0] @ blocks[slowest]),
        "launches": work.launches @ counts[slowest],
        "kept": kept,
        "largest_block": work.activations[:-2].max(initial=0.0),
        "beside": np.array([first * work.beside, last * work.beside]),
        "before": np.array([work.before, work.before if len(counts) == 1 else 0.0]),
        "message": work.message,
        "gathered": np.array([whole[which], experts[which]]),
        "reduced": np.array([back[which], back_experts[which]]),
        "blocks": max(blocks[slowest].sum(), 1.0),
        "held": (counts @ work.held)[places],
        "frozen": np.full(2, work.frozen),
        "step": work.step,
        "step_launches": work.step_launches,
    }
    return Stage(**{name: np.asarray(value, dtype=np.float64)[None] for name, value in rows.items()})


def stacked(stages: list[Stage]) -> Stage:
    """Rows under each other."""
    return Stage(**{name: np.concatenate([getattr(one, name) for one in stages]) for name in stages[0].__dict__})


@dataclass(frozen=True)
class Analysis:
    """One element a candidate."""

    parts: Parts
    memory: Estimate
    """Bytes that torch allocates on the fullest rank (resident ones on a CPU)."""
    needed: Estimate
    """Bytes of the device."""

    @property
    def step_ns(self) -> Estimate:
        """A step, with the range that should hold four of five measurements."""
        return self.parts.ranged()


def analyse(cluster: Cluster, candidates: Candidates, rows: NDArray[np.int64], one: Stage, two: Stage) -> Analysis:
    """Time and memory of all candidates. ``rows``: of each, its place in ``one`` and ``two`` (one sample, two)."""
    some = []
    for first in range(0, len(candidates), AT_ONCE):
        here = slice(first, first + AT_ONCE)
        columns = {name: column[here] for name, column in candidates.columns.items()}
        some.append(_analyse(cluster, Candidates(columns, candidates.schedules), rows[here], one, two))
    times = {name: _end_to_end([part.parts.times[name] for part in some]) for name in some[0].parts.times}
    memory, needed = (_end_to_end([getattr(part, name) for part in some]) for name in ("memory", "needed"))
    return Analysis(Parts(times), memory, needed)


def _end_to_end(some: list[Estimate]) -> Estimate:
    """Columns under each other."""
    return Estimate(*(np.concatenate([getattr(one, end) for one in some]) for end in ("value", "low", "high")))


def _analyse(cluster: Cluster, candidates: Candidates, rows: NDArray[np.int64], one: Stage, two: Stage) -> Analysis:
    many = _Candidates(candidates)
    stage = one.of_samples(two, rows, many.micro_batch, many.cp)
    forward, backward = (_pass(stage.passes[:, :, way] + stage.entry[:, :, way]) for way in (0, 1))
    forward, backward = (
        one_pass + Parts({"context": _context(cluster, stage, many, one_pass, way)})
        for way, one_pass in enumerate((forward, backward))
    )
    recomputed = _recomputed(stage, many, forward.times["context"])
    backward = backward + recomputed
    launches = stage.launches.sum(1) + np.where(many.full, stage.launches[:, 0], 0.0)
    data, rest = _data_parallel(cluster, stage, many, forward, backward)
    micro = forward + backward + Parts({"data": data})
    micro = micro + Parts({"host": _waited(launch(cluster, launches), micro, cluster)})
    message = collective_in(cluster, "send_recv", stage.message, many.pp, many.devices / many.pp)
    waits = 2.0 * message * ((many.pp - 1) + IN_STEADY_STATE * many.stages_per_rank * many.micro_batches)
    share = np.array([BUBBLE[name] for name in candidates.schedules])[candidates["schedule"]]
    idle = micro.end_by_end() * (share * (many.pp - 1) / many.stages_per_rank)
    step = micro * many.micro_batches + Parts({"bubble": idle, "pipeline": waits, "data": rest})
    step = step + Parts({"optimizer": _optimizer(cluster, stage, many)})
    total = step.total()
    step = step + Parts({"release": Estimate(0 * total, -LEFT_OUT * total, LEFT_OUT * total)})
    memory, needed = _memory(cluster, stage, many)
    nothing = Estimate.exactly(np.zeros(len(candidates)))
    return Analysis(Parts({name: time + nothing for name, time in step.times.items()}), memory, needed)


class _Candidates:
    """The columns that formulas use, as floats."""

    def __init__(self, candidates: Candidates) -> None:
        columns = {name: column.astype(np.float64) for name, column in candidates.columns.items()}
        self.devices, self.tp, self.pp, self.ep = (columns[name] for name in ("devices", "tp", "pp", "ep"))
        self.stages_per_rank, self.replicas = columns["stages_per_rank"], columns["dp_replicate"]
        self.cp = columns["cp_ring"] * columns["cp_ulysses"]
        self.ring, self.ulysses = columns["cp_ring"], columns["cp_ulysses"]
        self.micro_batch = columns["micro_batch"]
        self.shards = columns["dp_shard"] * self.cp
        self.micro_batches = columns["micro_batches"]
        self.checkpointing = candidates["checkpointing"]
        self.full = self.checkpointing == CHECKPOINTING.index("full")
        self.selective = self.checkpointing == CHECKPOINTING.index("selective")
        self.reshard = columns["reshard"] > 0
        schedules = np.array(candidates.schedules)[candidates["schedule"]]
        self.gpipe = schedules == "gpipe"
        self.interleaved = np.char.startswith(schedules, "interleaved")
        self.splits = (self.pp > 1) & np.isin(schedules, ("interleaved_zero_bubble", "zbv", "dualpipev"))


def _pass(times: Floats) -> Parts:
    """``[candidates, value low high, parts]``."""
    return Parts({name: Estimate(*times[:, :, place].T) for place, name in enumerate(PARTS)})


def _context(cluster: Cluster, stage: Stage, many: _Candidates, compute: Parts, way: int) -> Estimate:
    """All-to-alls before and after attention; and what of the keys' and values' way round is longer than attention.

    In groups of two each rank sends its half once. In larger ones parts are smaller, and of a ring's there are more.
    """
    bytes_sent, messages = stage.sent[:, :, way, 0] / many.tp[:, None], np.maximum(stage.sent[:, :, way, 1], 1e-9)
    each = 2 * bytes_sent / messages
    scattered = collective_in(cluster, "all_to_all", each[:, 0], many.ulysses, many.tp) * messages[:, 0]
    turns = messages[:, 1] * (many.ring - 1)
    round_ = collective_in(cluster, "send_recv", each[:, 1], many.ring, many.tp * many.ulysses) * turns
    behind = compute.times["attention"] * (1 - 1 / np.maximum(many.ring, 1))
    left = exposed(round_, behind)
    nothing = np.zeros(len(many.tp))
    found = scattered + Estimate(left.value, np.minimum(left.low, left.value), left.high)
    return Estimate(*(nothing + end for end in (found.value, found.low, found.high)))


def _recomputed(stage: Stage, many: _Candidates, context: Estimate) -> Parts:
    """What checkpointing repeats: a block's forward, or what is cheap of it. Split backward passes repeat it twice."""
    again = _pass(stage.blocks_forward)
    twice = np.where(many.splits, 2.0, 1.0)
    whole, cheap = np.where(many.full, twice, 0.0), np.where(many.selective, 1.0, 0.0)
    compute = again.times["matrix"] + again.times["attention"]
    found = {"recompute": compute * whole + again.times["memory"] * (whole + cheap)}
    found["tensor"] = again.times["tensor"] * (whole + SELECTIVE_TENSOR * cheap)
    found["expert"], found["context"] = again.times["expert"] * whole, context * whole
    return Parts(found)


def _data_parallel(
    cluster: Cluster, stage: Stage, many: _Candidates, forward: Parts, backward: Parts
) -> tuple[Estimate, Estimate]:
    """What is exposed of gathers in each micro-batch, and of reductions in the last one of a step."""

    def each(kind: Collective, sizes: Floats, among: str) -> Estimate:
        """A block's collective, over ``among``."""
        whole, experts = sizes[:, 0, 0] / stage.blocks, sizes[:, 1, 0] / stage.blocks
        expert_ranks = np.maximum(1.0, many.shards * many.tp / many.ep)
        if among == "replicas":
            apart = many.tp * many.shards
            return collective_in(cluster, kind, whole / many.shards + experts / expert_ranks, many.replicas, apart)
        time = collective_in(cluster, kind, whole, many.shards, many.tp)
        return time + collective_in(cluster, kind, experts, expert_ranks, many.ep) if experts.any() else time

    gather, reduce = each("all_gather", stage.gathered, "shards"), each("reduce_scatter", stage.reduced, "shards")
    replicate = each("all_reduce", stage.reduced, "replicas")
    once = (many.pp > 1) & ~many.reshard  # a pipeline keeps what it has gathered until the step's last micro-batch
    times = np.where(once, 1 / many.micro_batches, 1.0)
    blocks = stage.blocks
    ahead = gather + _beside(gather * blocks, forward, blocks)
    again = _beside(gather * blocks, backward, blocks) * np.where(many.reshard, 1.0, 0.0)
    slowed = cluster.achieved.compute_slowdown
    traffic = gather.value * blocks * (1.0 + many.reshard)
    beside = np.minimum(traffic, forward.total() + backward.total()) * (many.shards > 1)
    in_each = (ahead + again + Estimate(slowed.value * beside, slowed.low * beside, slowed.high * beside)) * times
    both = (gather * np.where(many.reshard, 1.0, 0.0) + reduce) * blocks
    last = _less(_beside(both, backward, blocks), again)
    rest = reduce + last + replicate + _beside(replicate * blocks, backward, blocks)
    hidden = np.minimum((reduce.value + replicate.value) * blocks, backward.total())
    return in_each, rest + Estimate(slowed.value * hidden, slowed.low * hidden, slowed.high * hidden)


def _beside(traffic: Estimate, compute: Parts, blocks: Floats) -> Estimate:
    """What is longer than the compute of all blocks but one."""
    ends = compute.end_by_end()
    left = exposed(traffic, Estimate(compute.total(), ends.low, ends.high) * (1 - 1 / np.maximum(blocks, 1)))
    return Estimate(left.value, np.minimum(left.low, left.value), np.maximum(left.high, left.value))


def _less(whole: Estimate, part: Estimate) -> Estimate:
    """End by end, nothing below 0."""
    return Estimate(*(np.maximum(0, getattr(whole, end) - getattr(part, end)) for end in ("value", "low", "high")))


def _waited(host: Estimate, device: Parts, cluster: Cluster) -> Estimate:
    """Where the host takes longer than the device; where it is the device, it launches besides."""
    if cluster.accelerator.form == CPU:
        return host
    left = exposed(host, device.end_by_end())
    value = np.maximum(0, host.value - device.total())
    return Estimate(value, np.minimum(left.low, value), np.maximum(left.high, value))


def _optimizer(cluster: Cluster, stage: Stage, many: _Candidates) -> Estimate:
    local = stage.held[:, 0] / many.shards
    device = Estimate(*(stage.step[:, end] * local for end in range(3)))
    return device.later(launch(cluster, stage.step_launches))


def _memory(cluster: Cluster, stage: Stage, many: _Candidates) -> tuple[Estimate, Estimate]:
    """Of the fuller of the first and the last rank: bytes allocated, and bytes of the device."""
    rank = np.arange(len(many.tp))
    fullest: tuple[Floats, Floats] | None = None
    for place in (0, 1):
        fixed = stage.held[:, place] / many.shards + stage.frozen[:, place] + _gathered(stage, many, place)
        kept = stage.kept[rank, many.checkpointing, place] * _in_flight(many, place)
        at_work = np.where(many.full, stage.largest_block, 0.0)  # recomputed when the logits are gone
        moving = np.maximum(stage.before[:, place], kept + np.maximum(stage.beside[:, place], at_work))
        if fullest is None:
            fullest = fixed, moving
        else:
            more = fixed + moving > fullest[0] + fullest[1]
            fullest = np.where(more, fixed, fullest[0]), np.where(more, moving, fullest[1])
    assert fullest is not None
    fixed, moving = fullest
    value = fixed + moving
    low, high = ALLOCATED_RANGE[0] * value, ALLOCATED_RANGE[1] * value
    allocated = Estimate(value, low - ACTIVATION_RANGE * moving, high + ACTIVATION_RANGE * moving)
    if cluster.accelerator.form == CPU:
        allocated = allocated + Estimate(*INTERPRETER_BYTES)
        return allocated, allocated
    axes = (many.replicas, many.shards, many.tp, many.cp, many.pp, many.ep)
    communicators: Floats = np.sum([axis > 1 for axis in axes], axis=0, dtype=np.float64)
    outside = Estimate(*CONTEXT_BYTES) + Estimate(*COMMUNICATOR_BYTES) * communicators
    return allocated, allocated + outside


def _gathered(stage: Stage, many: _Candidates, place: int) -> Floats:
    """Whole parameters at hand: a block and the next, or all; and sums of gradients that are not reduced yet."""
    whole = stage.gathered[:, :, place + 1].sum(1)
    some = np.where(many.reshard, np.minimum(1.0, 2 / stage.blocks), 1.0)
    sums = np.where((many.micro_batches > 1) & (many.shards * many.replicas > 1), 1.0, 0.0)
    return whole * some + stage.reduced[:, :, place + 1].sum(1) * sums


def _in_flight(many: _Candidates, place: int) -> Floats:
    """Micro-batches whose activations the first or the last rank of a pipeline keeps (Narayanan et al. 2021)."""
    first = place == 0
    plain = many.pp if first else np.ones(len(many.pp))
    warm = (2 * (many.pp - 1) if first else 0 * many.pp) + (many.stages_per_rank - 1) * many.pp + 1
    found = np.where(many.interleaved, warm / many.stages_per_rank, plain)
    found = np.where(many.splits & ~many.interleaved, many.pp, found)  # V-shaped: all ranks keep as much
    found = np.where(many.gpipe, many.micro_batches, found)
    return np.where(many.pp > 1, np.minimum(found, many.micro_batches), 1.0)


def out_of_memory(needed: Estimate, cluster: Cluster, erfc: Callable[[float], float]) -> Floats:
    """Chance that more is needed than the device has, as ``rehearse.memory`` has it; 0 on a CPU."""
    value = np.asarray(needed.value)
    if cluster.accelerator.form == CPU:
        return np.zeros_like(value)
    usable = [end * cluster.accelerator.memory_gb * GIB for end in USABLE]
    room = usable[0] - value
    above = np.hypot(needed.high - value, usable[0] - usable[1])
    below = np.hypot(value - needed.low, usable[2] - usable[0])
    deviation = np.where(room >= 0, above, below) / 1.2816
    return 0.5 * np.vectorize(erfc, otypes=[np.float64])(room / deviation / np.sqrt(2))
