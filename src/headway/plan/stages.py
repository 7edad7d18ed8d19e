"""Which recorded blocks stand for what a pipeline's ranks have: counts, rank by rank."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from headway.parallel.pipeline import PipelinePlan
from headway.plan.rules import Rules
from headway.recipe import LayoutRecipe, Recipe
from headway.rehearse.shortening import shortened

Floats = NDArray[np.float64]


def stand_ins(recipe: Recipe, blocks: int, recorded: tuple[str, ...]) -> list[int]:
    """For each of the model's ``blocks``, in order, the place in ``recorded`` of the one that stands for it."""
    if len(recorded) == blocks:
        return list(range(blocks))
    whole = recipe.model_copy(update={"layout": LayoutRecipe()})
    few = shortened(whole, 1, 0)
    assert few is not None
    found: list[int] = []
    for (_, name), depth in few.counts.items():
        own = [place for place, path in enumerate(recorded) if path.rpartition(".")[0] == name]
        middle = len(own) // 2
        found += own[:middle] + [own[middle]] * (depth - len(own) + 1) + own[middle + 1 :]
    return found


class Stages:
    """Counts of recorded places on the ranks of a pipeline."""

    def __init__(self, rules: Rules, standing: list[int], places: int) -> None:
        """``standing``: see ``stand_ins``; ``places``: recorded blocks, with the two ends."""
        self._rules = rules
        self._standing = standing
        self._places = places
        self.counts = cache(self._counts)

    def _counts(self, pp: int, schedule: str, stages_per_rank: int) -> Floats:
        """``[ranks, places]``."""
        if pp == 1:
            ranks = [range(len(self._standing))]
            ends = [(0, 0)]
        else:
            cuts = self._rules.cuts(pp * stages_per_rank)
            assert not isinstance(cuts, str)
            plan = PipelinePlan(schedule, pp, cuts)
            ranks = [[block for stage in plan.stages_of(rank) for block in plan.blocks_of(stage)] for rank in range(pp)]  # type: ignore[misc]
            ends = [(plan.rank_of(0), plan.rank_of(plan.stages - 1))]
        found = np.zeros((pp, self._places))
        for rank, blocks in enumerate(ranks):
            for block in blocks:
                found[rank, self._standing[block]] += 1
        entry, leaving = ends[0]
        found[entry, self._places - 2] += 1
        found[leaving, self._places - 1] += 1
        return found
