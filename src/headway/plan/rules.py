"""Which layouts a model can have: the checks of training, asked once for each distinct value."""

from collections.abc import Callable
from functools import cache
from typing import Any

from headway.errors import UserError
from headway.models import find_routers
from headway.parallel import check_tensor_parallel
from headway.parallel.context_parallel import check_context_parallel
from headway.parallel.expert_parallel import check_expert_parallel
from headway.parallel.pipeline import SCHEDULES, PipelinePlan, plan_pipeline
from headway.recipe import LayoutRecipe, Recipe
from headway.rehearse.model_on_meta import model_on_meta
from headway.train.assembly import block_costs_of
from headway.train.layout import check_sequence_length

MOST_STAGES_PER_RANK = 4
"""Of interleaved schedules, in a search."""


class Rules:
    """What stands in the way of a layout: a reason, or None."""

    def __init__(self, recipe: Recipe) -> None:
        """Builds the recipe's model on meta, from config.json alone. Raises UserError for one that can't be built."""
        self.recipe = recipe
        self.built = model_on_meta(recipe)
        main: Any = self.built.components[0].module
        self.has_experts = bool(find_routers(main))
        self.tensor: Callable[[int, bool], str | None] = cache(lambda tp, has_cp: self._tensor(main, tp, has_cp))
        self.context: Callable[[int, int, int], str | None] = cache(
            lambda ring, ulysses, tp: _reason(lambda: check_context_parallel(main, ring=ring, ulysses=ulysses, tp=tp))
        )
        self.expert: Callable[[int, int], str | None] = cache(
            lambda ep, ranks: _reason(lambda: check_expert_parallel(main, ep, ranks))
        )
        self.costs = cache(lambda: block_costs_of(recipe, self.built))
        self.cuts: Callable[[int], tuple[int, ...] | str] = cache(self._cuts)
        self.schedule: Callable[[str, int, int, int], str | None] = cache(self._schedule)
        self.policy: Callable[[str, str, bool], str | None] = cache(self._policy)

    def _tensor(self, main: Any, tp: int, has_cp: bool) -> str | None:
        """Weights' division, and that of sequences, which context parallelism pads."""
        if tp == 1:
            return None
        return _reason(lambda: check_sequence_length(self.recipe, tp, has_cp)) or _reason(
            lambda: check_tensor_parallel(main, tp)
        )

    def _cuts(self, stages: int) -> tuple[int, ...] | str:
        """Blocks of each of ``stages`` stages, or why there are none."""
        layout = LayoutRecipe(pp=stages, pp_schedule="gpipe")
        try:
            return self._plan(layout, micro_batches=stages, checkpointing="none").cuts
        except UserError as error:
            return str(error)

    def _schedule(self, name: str, pp: int, stages_per_rank: int, micro_batches: int) -> str | None:
        """Whether a schedule can be made of so many micro-batches."""
        if SCHEDULES[name].takes(pp, micro_batches):
            return None
        layout = LayoutRecipe(pp=pp, pp_schedule=name, pp_stages_per_rank=stages_per_rank)  # type: ignore[arg-type]
        return _reason(lambda: self._plan(layout, micro_batches=micro_batches, checkpointing="none"))

    def _policy(self, name: str, checkpointing: str, reshard: bool) -> str | None:
        """Whether a schedule goes with what blocks keep, and with compiled blocks."""
        kind = SCHEDULES[name]
        layout = LayoutRecipe(
            pp=2,
            pp_schedule=name,  # type: ignore[arg-type]
            pp_stages_per_rank=(kind.stages_per_rank or (2,))[0],
            reshard_after_forward=reshard,
        )
        if isinstance(self.cuts(2 * (kind.stages_per_rank or (2,))[0]), str):
            return None  # no pipeline of this schedule at all: told elsewhere
        return _reason(lambda: self._plan(layout, micro_batches=4, checkpointing=checkpointing))

    def _plan(self, layout: LayoutRecipe, *, micro_batches: int, checkpointing: str) -> PipelinePlan:
        return plan_pipeline(
            layout,
            self.built.module,
            micro_batches=micro_batches,
            compiled=self.recipe.run.compile,
            checkpointing=checkpointing,
            costs=self.costs,
        )


def schedules_of(pp: int) -> list[tuple[str, int]]:
    """(schedule, stages a rank) of a pipeline of ``pp`` ranks."""
    if pp == 1:
        return [("1f1b", 1)]
    found = []
    for name, kind in SCHEDULES.items():
        several = kind.stages_per_rank or tuple(range(2, MOST_STAGES_PER_RANK + 1))
        found += [(name, number) for number in several]
    return found


def _reason(check: Callable[[], object]) -> str | None:
    try:
        check()
    except UserError as error:
        return str(error)
    return None
