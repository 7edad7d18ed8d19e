"""A recipe with few blocks that stands for one with many: what to rehearse, and how far to extend the record."""

from dataclasses import dataclass

from headway.recipe import Recipe, sizes
from headway.rehearse.depths import depths, with_depths
from headway.rehearse.extension import Series
from headway.rehearse.record import Facts
from headway.rehearse.stage_blocks import BlocksOfStages, blocks_of_stages, stages_of

TEMPLATE = 3
"""The block to repeat, from 0: what it uses was made by two before it (FSDP2 frees the buffer of a gather two blocks
later), and the first one differs."""
REHEARSED = TEMPLATE + 4
"""Blocks of a list on a stage in a shortened recipe. In backward passes the last one differs, gradients of what all
blocks are given (a timestep's embedding) are added up from the second to last on, and freed one block later."""


@dataclass(frozen=True)
class Shortened:
    """Recipes to rehearse in place of one."""

    base: Recipe
    longer: list[Recipe]
    """``base`` with one more block of each extended list of this rank, in the order of ``extended``."""
    own: list[tuple[int, str]]
    """(stage, module list) of this rank."""
    extended: list[tuple[int, str]]
    """Those of which ``base`` has fewer blocks than the whole model."""
    counts: BlocksOfStages
    """Of the whole model."""

    def series(self, base: Facts) -> list[Series]:
        """How the record of ``base`` is to be extended: one for each of ``own``."""
        return [self._one(base, stage, name) for stage, name in self.own]

    def paths(self, facts: Facts) -> list[list[str]]:
        """The blocks of each of ``own`` in a record of one of the recipes."""
        return [_paths(facts, stage, name) for stage, name in self.own]

    def _one(self, base: Facts, stage: int, name: str) -> Series:
        paths = _paths(base, stage, name)
        start = sum(count for (other, list_name), count in self.counts.items() if list_name == name and other < stage)
        count = self.counts[stage, name]
        whole = [f"{name}.{start + place}" for place in range(count)]
        return Series(paths, template=min(TEMPLATE, len(paths) - 1), copies=count - len(paths), whole=whole)


def shortened(recipe: Recipe, devices: int, rank: int) -> Shortened | None:
    """What to rehearse in place of ``recipe``, the cuts of which are said; None: the recipe itself.

    Of stages of other ranks one block of each list is left.
    """
    known = depths(recipe)
    if known is None or (recipe.optim.kind == "muon" and sizes(recipe.layout, devices).stage > 1):
        return None  # Muon shares out matrices by their number: what a rank gets does not repeat with the blocks
    counts = blocks_of_stages(recipe, known)
    if counts is None:
        return None
    stages = set(stages_of(recipe, devices, rank))
    own = [key for key in counts if key[0] in stages]
    few = REHEARSED + max(0, recipe.layout.blocks_kept_gathered - 1)
    extended = _worthwhile({key: counts[key] for key in own}, few)
    short = {key: count if key[0] in stages else 1 for key, count in counts.items()} | dict.fromkeys(extended, few)
    if short == counts:
        return None
    longer = [_with_counts(recipe, short | {key: few + 1}) for key in extended]
    return Shortened(_with_counts(recipe, short), longer, own, extended, counts)


def _worthwhile(counts: BlocksOfStages, few: int) -> list[tuple[int, str]]:
    """Lists to rehearse with ``few`` blocks: those by which fewer blocks are rehearsed in all than ``counts`` has.

    With each of them goes another rehearsal, which has one block more.
    """
    extended = sorted((key for key in counts if counts[key] > few + 1), key=lambda key: counts[key])
    while extended:
        left = sum(few if key in extended else count for key, count in counts.items())
        if (1 + len(extended)) * left + len(extended) < sum(counts.values()):
            break
        del extended[0]
    return [key for key in counts if key in extended]


def _paths(facts: Facts, stage: int, name: str) -> list[str]:
    return [p for p in facts.blocks if p.rpartition(".")[0] == name and facts.block_stages[p] == stage]


def _with_counts(recipe: Recipe, counts: BlocksOfStages) -> Recipe:
    """``recipe`` with other numbers of blocks on the stages."""
    names = {name for _, name in counts}
    short = with_depths(recipe, {n: sum(c for (_, other), c in counts.items() if other == n) for n in names})
    if recipe.layout.pp == 1:
        return short
    stages = max(stage for stage, _ in counts) + 1
    cuts = [sum(count for (other, _), count in counts.items() if other == stage) for stage in range(stages)]
    return short.model_copy(update={"layout": recipe.layout.model_copy(update={"pp_cuts": cuts})})
