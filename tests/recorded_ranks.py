"""Real runs over gloo, written down by the recorder that rehearsals use, and records compared."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from headway.models import build_model
from headway.parallel import Ranks
from headway.recipe import Recipe, accumulation, sizes
from headway.rehearse.patches import recorded_streams
from headway.rehearse.record import Operator, Record
from headway.rehearse.recorded_step import record_step
from headway.rehearse.step_sizes import step_sizes
from headway.rehearse.streams import Device
from headway.rehearse.tokens import renumbered
from headway.train import layout
from headway.train.assembly import assemble_step
from headway.train.flops import Flops
from headway.train.trainer import read_on_host
from headway.train.unread_batches import rehearsed_batch, unread_tokenizers

CPU = torch.device("cpu")


def recorded(recipe: Recipe) -> Record:
    """The second step of this rank of a real run, on values that are all 0 or 1."""
    layout.has_bfloat16_instructions = lambda: True  # products are not to be emulated: they would be other operators
    device = Device()
    with recorded_streams(device):
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU)
        tokenizers = unread_tokenizers(recipe)
        built = build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=tokenizers)
        parts = assemble_step(recipe, ranks, built, lambda tensors: Flops(0, 0, 0), "")
        number = accumulation(recipe.run.global_batch, recipe.run.micro_batch, sizes(recipe.layout, ranks.world).data)
        batches = [rehearsed_batch(recipe, built, ones) for _ in range(number)]
        for batch in batches:
            if "input_ids" in batch.tensors:  # tokens that differ, so that experts do not all get the same
                batch.tensors["input_ids"] += torch.arange(batch.tensors["input_ids"].shape[1]) * 7 % 250
        return record_step(recipe, parts, batches, device, step_sizes(recipe), read_on_host)


def ones(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def different(rehearsed: Record, real: Record) -> list[str]:
    """In what two records of one step differ, in words."""
    found = []
    first, second = comparable(rehearsed), comparable(real)
    if len(first) != len(second):
        found.append(
            f"{len(first)} and {len(second)} operators: {names(first) - names(second)} {names(second) - names(first)}"
        )
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            found.append(f"operator {number}:\n  {one}\n  {other}")
            break
    if [read.reason for read in rehearsed.host_reads] != [read.reason for read in real.host_reads]:
        found.append("host reads")
    if rehearsed.groups != real.groups:
        found.append(f"groups {rehearsed.groups} {real.groups}")
    if rehearsed.facts != real.facts:
        found.append(f"facts {rehearsed.facts} {real.facts}")
    return found


def names(operators: list[Operator]) -> Counter[str]:
    return Counter(operator.name for operator in operators)


def comparable(record: Record) -> list[Operator]:
    """The operators without those of gloo, which has no reduce-scatter: it copies out of an all-reduce."""
    return renumbered(replace(record, operators=without_copies(record.operators))).operators


def without_copies(operators: list[Operator]) -> list[Operator]:
    kept: list[Operator] = []
    numbers: dict[int, int] = {}
    for number, operator in enumerate(operators):
        if kept and _ends_reduce_scatter(kept[-1], operator):
            numbers[number] = len(kept) - 1
        else:
            numbers[number] = len(kept)
            kept.append(replace(operator, after=tuple(sorted({numbers[earlier] for earlier in operator.after}))))
    return kept


def _ends_reduce_scatter(before: Operator, operator: Operator) -> bool:
    scattered = before.collective is not None and before.collective.kind == "reduce_scatter"
    return scattered and operator.name == "aten.copy_.default"


def held(record: Record) -> dict[str, Any]:
    """Bytes allocated during the step, and there before it, by what they are held for.

    Without what gloo's reduce-scatter takes for itself: a thread of gloo lets go of it, at no certain moment.
    """
    of_gloo = _storages(record.operators) - _storages(without_copies(record.operators))
    totals: Counter[str] = Counter()
    for allocation in record.allocations:
        if allocation.storage not in of_gloo:
            when = "before" if allocation.allocated_event < 0 else "during"
            totals[f"{allocation.category} {when}"] += allocation.bytes
    return dict(totals)


def _storages(operators: list[Operator]) -> set[int]:
    return {access.storage for operator in operators for access in (*operator.reads, *operator.writes)}
