"""Which repeated blocks the stages of a recipe's pipeline have, told from its config and a model with few of them."""

from functools import lru_cache

from headway.parallel.pipeline import SCHEDULES, BlockCosts, PipelinePlan, balanced_cuts
from headway.parallel.pipeline.families import find_pipelined
from headway.recipe import LayoutRecipe, Recipe, sizes
from headway.rehearse.depths import Depths, depths, with_depths
from headway.rehearse.model_on_meta import model_on_meta
from headway.train.assembly import block_costs_of

BlocksOfStages = dict[tuple[int, str], int]
"""(stage, module list) -> blocks; those that have none are left out."""


def stages_of(recipe: Recipe, devices: int, rank: int) -> list[int]:
    """The stages of the whole pipeline that ``rank`` has."""
    layout = recipe.layout
    if layout.pp == 1:
        return [0]
    plan = PipelinePlan(layout.pp_schedule, layout.pp, (1,) * _stages(layout))
    return plan.stages_of(rank // sizes(layout, devices).stage)


def with_cuts(recipe: Recipe) -> Recipe:
    """``recipe`` with the cuts of its pipeline said, where they are not and its blocks are known to be alike.

    They are those that ``plan_pipeline`` finds on the whole model, without building it.
    """
    known = depths(recipe)
    if recipe.layout.pp == 1 or recipe.layout.pp_cuts is not None or known is None:
        return recipe
    stages = _stages(recipe.layout)
    if sum(known.values()) < 2 * stages:
        return recipe
    cuts = list(_balanced(recipe, known, stages))
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"pp_cuts": cuts})})


def blocks_of_stages(recipe: Recipe, known: Depths) -> BlocksOfStages | None:
    """Of the whole model. ``known``: its depths. None: the recipe does not say the cuts of its pipeline."""
    if recipe.layout.pp == 1:
        return {(0, name): depth for name, depth in known.items()}
    if recipe.layout.pp_cuts is None:
        return None
    found: BlocksOfStages = {}
    names = [name for name, depth in known.items() for _ in range(depth)]
    start = 0
    for stage, number in enumerate(recipe.layout.pp_cuts):
        for name in known:
            found[stage, name] = names[start : start + number].count(name)
        start += number
    return {key: count for key, count in found.items() if count}


def _stages(layout: LayoutRecipe) -> int:
    kind = SCHEDULES[layout.pp_schedule]
    own = layout.pp_stages_per_rank
    if own == "auto":
        own = kind.stages_per_rank[0] if kind.stages_per_rank else 2
    return layout.pp * own


def _balanced(recipe: Recipe, known: Depths, stages: int) -> tuple[int, ...]:
    """The cuts of the whole model, from the costs of the first two blocks of each list."""
    few = {name: min(2, depth) for name, depth in known.items()}
    short = with_depths(recipe.model_copy(update={"layout": LayoutRecipe()}), few)
    counted, first_blocks = _counted(short.model_dump_json())
    costs = iter(counted.blocks)
    blocks: list[float] = []
    for name, depth in known.items():
        own = [next(costs) for _ in range(few[name])]
        blocks += own[:1] * (depth - few[name]) + own
    return balanced_cuts(BlockCosts(counted.entry, tuple(blocks), counted.exit), stages, first_blocks)


@lru_cache(maxsize=16)
def _counted(document: str) -> tuple[BlockCosts, int]:
    """Costs of the blocks of a recipe as JSON, and how many of them its first stage must have."""
    recipe = Recipe.model_validate_json(document)
    built = model_on_meta(recipe)
    return block_costs_of(recipe, built), find_pipelined(built.module).recipe.first_blocks
