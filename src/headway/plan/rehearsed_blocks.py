"""What blocks do and hold in one layout of their own, from the record of a rehearsal with few of them.

Two rehearsals of a division of blocks (tensor and expert parallelism), with one sample and with two, say what one
sample more adds: times and bytes of both are affine in the samples of a micro-batch. A rank of a context-parallel group
has a part of each sample, and what it sends is in proportion to what ranks of a group of two send. Depth, data
parallelism, pipeline, accumulation and checkpointing are added by ``analytic.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.parallel import KEPT_OPERATORS
from headway.plan.choice import Precision
from headway.recipe import LayoutRecipe, Recipe
from headway.rehearse import BEFORE, Allocation, Program, Record, program_of, rehearse_whole
from headway.rehearse.shortening import shortened

Floats = NDArray[np.float64]
PARTS = ("matrix", "attention", "memory", "tensor", "expert")
"""Of a pass: products, attention, all other operators, and communication of tensor and expert parallelism."""
CONTEXT = ("cp_ulysses", "cp_ring")
"""Axes of context parallelism, with what is sent over them."""
_KEPT = frozenset(str(operator) for operator in KEPT_OPERATORS)
_AXES = {"tp": "tensor", "ep": "expert"}
_SHARED = ("parameter", "gradient", "optimizer", "ema")
"""What is held for parameters, and shared out with them."""


class Unit(NamedTuple):
    """What decides what a block does with a sample."""

    tp: int
    ep: int
    precision: Precision
    cp_ring: int = 1
    cp_ulysses: int = 1


@dataclass(frozen=True)
class BlockWork:
    """A micro-batch of one rank that has all blocks. Places: recorded blocks, what comes before them, and after.

    Times in ns, bytes; the last axis of arrays is the place.
    """

    times: Floats
    """``[value low high, forward backward, parts, places]``."""
    launches: Floats
    """``[forward backward, places]``: operators that the host launches."""
    activations: Floats
    """Kept for the backward pass, without checkpointing: ``[places]``."""
    kept_selectively: Floats
    """Of these what selective checkpointing keeps: results of products, attention and communication, and inputs."""
    gathered: Floats
    """Whole parameters in the compute dtype, not those of experts that are shared: ``[places]``."""
    gathered_experts: Floats
    """Those that are: ``[places]``."""
    reduced: Floats
    """As ``gathered``, gradients in the reduce dtype."""
    reduced_experts: Floats
    held: Floats
    """Shards of parameters, gradients, optimizer states and averages of all data-parallel ranks together."""
    before: float
    """Most bytes at once before the first block, besides what is in the other fields: text encoders and VAE at work."""
    beside: float
    """Likewise from the first block on: logits and loss, gradients of activations, buffers."""
    frozen: float
    """Bytes of frozen parts and buffers."""
    step: Floats
    """``[value low high]``: ns of optimizer, norms and averages for a byte of ``held``, whatever the samples."""
    step_launches: float
    message: float
    """Bytes that a block hands to the next one."""
    sent: Floats
    """Over context-parallel axes, ``[CONTEXT, forward backward, bytes messages, places]``."""


def rehearsed_blocks(recipe: Recipe, unit: Unit, samples: int) -> Record:
    """The record of a unit with so many samples. Raises UserError for what can't be rehearsed."""
    cp = unit.cp_ring * unit.cp_ulysses
    shards = next(n for n in range(2, 2 * unit.ep + 2) if n * cp * unit.tp % unit.ep == 0)
    layout = LayoutRecipe(
        dp_shard=shards,
        tp=unit.tp,
        sequence_parallel=recipe.layout.sequence_parallel,
        cp=cp,
        cp_kind="ulysses" if unit.cp_ring == 1 else "ring" if unit.cp_ulysses == 1 else "both",
        cp_ulysses=unit.cp_ulysses if min(unit.cp_ring, unit.cp_ulysses) > 1 else None,
        ep=unit.ep,
        prefetch=recipe.layout.prefetch,
    )
    changes: dict[str, Any] = {
        "layout": layout,
        "run": recipe.run.model_copy(update={"micro_batch": samples, "global_batch": samples * shards}),
        "memory": recipe.memory.model_copy(update={"activation_checkpointing": "none", "offload_activations": False}),
        "precision": recipe.precision.model_copy(update={"compute": unit.precision}),
    }
    alone = recipe.model_copy(update=changes)
    world = shards * cp * unit.tp
    few = shortened(alone, world, 0)
    return rehearse_whole(alone if few is None else few.base, world, 0)


def work_of(record: Record, cluster: Cluster) -> BlockWork:
    """Times of a record on ``cluster``, and what it holds, by place. Raises UserError where a rate is not known."""
    program = program_of(record, cluster)
    paths = list(record.facts.blocks)
    place = _places(record, paths)
    count = len(paths) + 2
    times, launches, step = _times(record, program, place, count)
    held = _bytes(record, paths, lambda one: one.category in _SHARED) * _shards(record)
    parameters = _bytes(record, paths, lambda one: one.category == "parameter") * _shards(record)
    dense, experts = _gathers(record, place, count)
    reduce_bytes = _reduced_over_gathered(record)
    first = next((n for n, op in enumerate(record.operators) if op.block and op.phase == "forward"), 0)
    before, beside = _moving(record, first, set(paths))
    message = _message(record, paths)
    return BlockWork(
        times=times,
        launches=launches,
        activations=_bytes(record, paths, _is_activation),
        kept_selectively=_bytes(record, paths, lambda one: _is_activation(one) and _is_kept(record, one))
        + np.append(np.full(len(paths), message), (0.0, 0.0)),
        gathered=_with_ends(dense, parameters),
        gathered_experts=experts,
        reduced=_with_ends(dense, parameters) * reduce_bytes,
        reduced_experts=experts * reduce_bytes,
        held=held,
        before=before,
        beside=beside,
        frozen=float(sum(one.bytes for one in record.allocations if one.category == "frozen")),
        step=step / max(float(held.sum()) / _shards(record), 1.0),
        step_launches=float(sum(op.phase in ("optimizer", "other") for op in record.operators)),
        message=message,
        sent=_sent(record, place, count),
    )


def _places(record: Record, paths: list[str]) -> NDArray[np.int64]:
    """Of each operator: number of its block, or ``len(paths)`` before the blocks and one more after them."""
    entry, leaving = len(paths), len(paths) + 1
    number = {path: place for place, path in enumerate(paths)}
    inside = [n for n, op in enumerate(record.operators) if op.block and op.phase == "forward"]
    back = [n for n, op in enumerate(record.operators) if op.block and op.phase == "backward"]
    last, again = (max(inside, default=-1), max(back, default=-1))
    found = []
    for n, op in enumerate(record.operators):
        if op.block:
            found.append(number[op.block])
        elif op.phase == "backward":
            found.append(entry if n > again else leaving)
        else:
            found.append(leaving if n > last else entry)
    return np.array(found, dtype=np.int64)


def _times(record: Record, program: Program, place: NDArray[np.int64], count: int) -> tuple[Floats, Floats, Floats]:
    """``times`` and ``launches`` of a BlockWork, and ns of what is outside of the passes ``[value low high]``."""
    known = program.durations
    times = np.zeros((3, 2, len(PARTS), count))
    launches, step = np.zeros((2, count)), np.zeros(3)
    for number, op in enumerate(record.operators):
        ends = (known.value[number], known.low[number], known.high[number])
        if op.phase in ("optimizer", "other"):
            if op.collective is None:
                step += ends
            continue
        way = int(op.phase == "backward")
        launches[way, place[number]] += known.launched[number]
        part = _part(record, op)
        if part is not None:
            times[:, way, PARTS.index(part), place[number]] += ends
    return times, launches, step


def _part(record: Record, op: Any) -> str | None:
    """What an operator counts as; None for what sharding alone does, which depends on the shards."""
    if op.collective is not None:
        return _AXES.get(record.groups[op.collective.group].axis)
    if op.lane.startswith("fsdp"):
        return None
    return {"product": "matrix", "attention": "attention"}.get(op.kind, "memory")


def _shards(record: Record) -> int:
    """Ranks that share a parameter: experts' too, with those that have other experts."""
    sizes = record.facts.sizes
    return sizes["dp_shard"] * sizes["cp_ring"] * sizes["cp_ulysses"]


def _bytes(record: Record, paths: list[str], chosen: Callable[[Allocation], bool]) -> Floats:
    """Of the chosen allocations, by place; what is of no block counts half before and half after the blocks."""
    found = np.zeros(len(paths) + 2)
    number = {path: place for place, path in enumerate(paths)}
    for one in record.allocations:
        if not chosen(one):
            continue
        parts = one.module.split(".")
        owner = next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in number), None)
        if owner is None:
            found[-2:] += one.bytes / 2
        else:
            found[number[owner]] += one.bytes
    return found


def _is_activation(one: Allocation) -> bool:
    return one.category == "activation" and one.allocated_event != BEFORE


def _is_kept(record: Record, one: Allocation) -> bool:
    """Whether the operator that made it is one whose results selective checkpointing keeps."""
    return one.allocated_at < len(record.operators) and record.operators[one.allocated_at].name in _KEPT


def _gathers(record: Record, place: NDArray[np.int64], count: int) -> tuple[Floats, Floats]:
    """Bytes that blocks gather forward: over data-parallel ranks, and over those that share an expert's parameters."""
    dense, experts = np.zeros(count), np.zeros(count)
    for number, op in enumerate(record.operators):
        if op.collective is None or op.collective.kind != "all_gather" or op.phase != "forward":
            continue
        axis = record.groups[op.collective.group].axis
        if axis == "shard":
            dense[place[number]] += op.collective.bytes
        elif axis == "expert_shard":
            experts[place[number]] += op.collective.bytes
    return dense, experts


def _with_ends(dense: Floats, parameters: Floats) -> Floats:
    """Gathers by place: all bytes, shared out as parameters are, for blocks are gathered ahead of their turn."""
    whole = max(float(parameters.sum()), 1.0)
    return parameters / whole * float(dense.sum())


def _reduced_over_gathered(record: Record) -> float:
    """Bytes of gradients over those of gathered parameters."""
    gathered = reduced = 0
    for op in record.operators:
        if op.collective is None or record.groups[op.collective.group].axis not in ("shard", "expert_shard"):
            continue
        if op.collective.kind == "all_gather" and op.phase == "forward":
            gathered += op.collective.bytes
        elif op.collective.kind == "reduce_scatter":
            reduced += op.collective.bytes
    return reduced / gathered if gathered else 0.0


def _moving(record: Record, first: int, blocks: set[str]) -> tuple[float, float]:
    """Most bytes at once, before operator ``first`` and from it on, of what no other field of a BlockWork counts."""
    events = []
    for one in record.allocations:
        if one.category in (*_SHARED, "frozen", "gathered") or one.allocated_event == BEFORE:
            continue
        if one.category == "activation" and _is_in(one.module, blocks):
            continue
        events += [(one.allocated_event, one.bytes, one.allocated_at), (one.freed_event, -one.bytes, one.freed_at)]
    held = before = beside = 0
    for _, change, at in sorted(events):
        held += change
        if at < first:
            before = max(before, held)
        else:
            beside = max(beside, held)
    return float(before), float(beside)


def _is_in(module: str, blocks: set[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in blocks for length in range(len(parts), 0, -1))


def _sent(record: Record, place: NDArray[np.int64], count: int) -> Floats:
    found = np.zeros((len(CONTEXT), 2, 2, count))
    for number, op in enumerate(record.operators):
        if op.collective is None or op.collective.kind == "recv":
            continue
        axis = record.groups[op.collective.group].axis
        if axis in CONTEXT:
            found[CONTEXT.index(axis), int(op.phase == "backward"), :, place[number]] += (op.collective.bytes, 1)
    return found


def _message(record: Record, paths: list[str]) -> float:
    """Bytes of what the middle block writes last in the forward pass: the hidden states it hands on."""
    middle = paths[len(paths) // 2]
    writes = [op.bytes_written for op in record.operators if op.block == middle and op.phase == "forward"]
    return float(writes[-1]) if writes else 0.0
