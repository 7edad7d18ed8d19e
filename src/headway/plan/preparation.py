"""From candidates to the rehearsed blocks that they are made of: the few rehearsals that a search needs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster, Level, link_achieved_on
from headway.errors import UserError
from headway.plan.analytic import Stage, stacked, stage_of
from headway.plan.rehearsed_blocks import CONTEXT, BlockWork, Floats, Unit, rehearsed_blocks, work_of
from headway.plan.rules import Rules
from headway.plan.search_space import PRECISIONS, Candidates
from headway.plan.stages import Stages, stand_ins
from headway.recipe import Recipe

_UNIT = ("tp", "ep", "precision")
_PIPELINE = ("pp", "schedule", "stages_per_rank")


@dataclass(frozen=True)
class Prepared:
    """Rows of stages with one sample and with two, and the row of each candidate."""

    one: Stage
    two: Stage
    rows: NDArray[np.int64]
    rehearsals: int


def prepare(recipe: Recipe, cluster: Cluster, rules: Rules, candidates: Candidates) -> Prepared:
    """Rehearse the blocks that ``candidates`` are made of. Raises UserError for what can't be rehearsed."""
    rehearsed = _Rehearsed(recipe, _with_room(cluster))
    precisions = [PRECISIONS[place] for place in np.unique(candidates["precision"])]
    base = Unit(1, 1, precisions[0])
    sent = rehearsed.sent(candidates, base)
    keys = np.stack([candidates[name] for name in (*_UNIT, *_PIPELINE)])
    kinds, rows = np.unique(keys, axis=1, return_inverse=True)
    paths = rehearsed.paths(base)
    standing = stand_ins(recipe, len(rules.built.blocks), paths)
    stages = Stages(rules, standing, len(paths) + 2)
    found: tuple[list[Stage], list[Stage]] = ([], [])
    for tp, ep, precision, pp, schedule, stages_per_rank in kinds.T.tolist():
        unit = Unit(tp, ep, PRECISIONS[precision])
        counts = stages.counts(pp, candidates.schedules[schedule], stages_per_rank)
        for samples, some in zip((1, 2), found, strict=True):
            some.append(stage_of(rehearsed.work(unit, samples), counts, sent * [[[samples], [1]]]))
    return Prepared(stacked(found[0]), stacked(found[1]), rows.ravel().astype(np.int64), rehearsed.count)


def _with_room(cluster: Cluster) -> Cluster:
    """``cluster`` with more devices beyond those that it has: blocks are rehearsed on two shards and more.

    What crosses the level that is added, shards' communication, is not used: ``analytic.py`` counts it.
    """
    outer = cluster.levels[-1] if cluster.levels else None
    devices = 1 if outer is None else outer.devices
    achieved = link_achieved_on(cluster.accelerator, "scale_up") if outer is None else outer.achieved
    bandwidth = 1.0 if outer is None else outer.gb_per_s_unidirectional
    room = Level(name="room", devices=4 * devices**2, gb_per_s_unidirectional=bandwidth, achieved=achieved)
    return cluster.model_copy(update={"levels": (*cluster.levels, room)})


class _Rehearsed:
    """Works by unit and samples, each rehearsed once."""

    def __init__(self, recipe: Recipe, cluster: Cluster) -> None:
        self._recipe = recipe
        self._cluster = cluster
        self._works: dict[tuple[Unit, int], BlockWork] = {}
        self._paths: dict[Unit, tuple[str, ...]] = {}

    @property
    def count(self) -> int:
        return len(self._works)

    def work(self, unit: Unit, samples: int) -> BlockWork:
        key = (unit, samples)
        if key not in self._works:
            record = rehearsed_blocks(self._recipe, unit, samples)
            self._paths[unit] = tuple(record.facts.blocks)
            self._works[key] = work_of(record, self._cluster)
        return self._works[key]

    def paths(self, unit: Unit) -> tuple[str, ...]:
        """Of the recorded blocks."""
        self.work(unit, 1)
        return self._paths[unit]

    def sent(self, candidates: Candidates, base: Unit) -> Floats:
        """What context-parallel ranks in groups of two send of one sample: see BlockWork."""
        found = np.zeros_like(self.work(base, 1).sent)
        pairs = (base._replace(cp_ulysses=2), base._replace(cp_ring=2))
        for place, (axis, unit) in enumerate(zip(CONTEXT, pairs, strict=True)):
            if (candidates[axis] > 1).any():
                found[place] = self.work(unit, 1).sent[place]
        return found


def check_recipe(recipe: Recipe) -> None:
    """Raises UserError for what fixes a part of the layout that a search chooses."""
    if recipe.layout.pp_cuts is not None:
        raise UserError(
            "layout.pp_cuts fixes the stages of one pipeline: leave it out of a recipe that is to be planned"
        )
