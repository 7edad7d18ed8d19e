"""How many of a step's micro-batches are rehearsed, and how the record of few becomes that of all."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from headway.parallel.pipeline.stage_runner import TensorShape
from headway.recipe import Recipe, accumulation, sizes
from headway.rehearse.contexts import Label, fewest
from headway.rehearse.dress_rehearsal import (
    rehearse_few_in_turn,
    rehearse_few_through_stages,
    rehearse_whole,
)
from headway.rehearse.few_micro_batches import DEPTH, sequential_order
from headway.rehearse.many_micro_batches import of_all_micro_batches, of_all_through_stages
from headway.rehearse.record import Record
from headway.rehearse.stage_blocks import stages_of
from headway.rehearse.step_sizes import step_sizes
from headway.rehearse.understudies import StageEdges, order_of


class Passing(Protocol):
    """What is rehearsed, and what it becomes."""

    def rehearsed(self, recipe: Recipe, devices: int, rank: int) -> Record:
        """Of a recipe that may have fewer blocks than the whole."""

    def completed(self, record: Record) -> Record:
        """With all micro-batches, where ``record`` has all blocks. Raises NotPeriodic when that can't be told."""


class AllMicroBatches:
    """All are rehearsed."""

    def rehearsed(self, recipe: Recipe, devices: int, rank: int) -> Record:
        """See Passing."""
        return rehearse_whole(recipe, devices, rank)

    def completed(self, record: Record) -> Record:
        """See Passing."""
        return record


@dataclass(frozen=True)
class FewInTurn:
    """Without a pipeline."""

    recipe: Recipe
    number: int
    few: int

    def rehearsed(self, recipe: Recipe, devices: int, rank: int) -> Record:
        """See Passing."""
        return rehearse_few_in_turn(recipe, devices, rank)

    def completed(self, record: Record) -> Record:
        """See Passing."""
        found = of_all_micro_batches(record, sequential_order(self.number), DEPTH)
        facts = record.facts
        counted = (
            step_sizes(self.recipe).model_flops * self.number * facts.sizes["dp_replicate"] * facts.sizes["dp_shard"]
        )
        # The rest is what frozen encoders did, in each micro-batch that passed.
        encoding = (facts.model_flops - counted) // self.few * self.number
        return replace(found, facts=replace(facts, model_flops=counted + encoding))


@dataclass
class FewThroughStages:
    """With a pipeline."""

    recipe: Recipe
    devices: int
    rank: int
    number: int
    orders: dict[int, list[Label]]
    depth: int = 1
    _edges: list[StageEdges] = field(default_factory=list)

    def rehearsed(self, recipe: Recipe, devices: int, rank: int) -> Record:
        """See Passing."""
        record, self._edges = rehearse_few_through_stages(recipe, devices, rank, self.orders)
        return record

    def completed(self, record: Record) -> Record:
        """See Passing."""
        played = order_of(self.recipe, self.devices, self.rank, self.number, self._edges)
        return of_all_through_stages(record, played, self.depth)


def fewer_micro_batches(recipe: Recipe, devices: int, rank: int) -> Passing | None:
    """How to rehearse fewer than all; None: there are few enough."""
    number = accumulation(recipe.run.global_batch, recipe.run.micro_batch, sizes(recipe.layout, devices).data)
    if recipe.layout.pp == 1:
        few = len(fewest(sequential_order(number), DEPTH))
        return FewInTurn(recipe, number, few) if few < number else None
    shapes = (TensorShape((1,), torch.bfloat16),)
    own = stages_of(recipe, devices, rank)
    count = 1 + max(stage for place in range(recipe.layout.pp) for stage in _stages(recipe, devices, place))
    unknown = [StageEdges(stage, count, shapes, stage > 0, stage < count - 1) for stage in own]
    orders: defaultdict[int, list[Label]] = defaultdict(list)
    for segment in order_of(recipe, devices, rank, number, unknown).segments:
        orders[segment.stage].append(segment.label)
    short = {stage: fewest(order, 1) for stage, order in orders.items()}
    if sum(map(len, short.values())) >= sum(map(len, orders.values())):
        return None
    return FewThroughStages(recipe, devices, rank, number, short)


def _stages(recipe: Recipe, devices: int, place: int) -> list[int]:
    return stages_of(recipe, devices, place * sizes(recipe.layout, devices).stage)
