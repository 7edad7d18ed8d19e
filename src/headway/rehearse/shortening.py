"""A recipe with few blocks that stands for one with many: what to rehearse, and how far to extend the record."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from headway.models.classes import find_class, read_config
from headway.parallel.pipeline import SCHEDULES, BlockCosts, PipelinePlan, balanced_cuts
from headway.parallel.pipeline.cuts import matrix_elements
from headway.parallel.pipeline.families import find_pipelined
from headway.recipe import Recipe, sizes
from headway.rehearse.extension import Series
from headway.rehearse.growth import linear
from headway.rehearse.model_on_meta import model_on_meta
from headway.rehearse.record import Facts
from headway.rehearse.step_sizes import StepSizes, step_sizes

LISTS = {
    "transformer.transformer_blocks": "num_layers",
    "transformer.single_transformer_blocks": "num_single_layers",
    "transformer.blocks": "num_layers",
    "model.layers": "num_hidden_layers",
}
"""Module list of blocks -> the key of the model's config that tells how many."""
IRREGULAR = (
    "dual_attention_layers",
    "mlp_only_layers",
    "no_rope_layers",
    "sliding_window_pattern",
    "decoder_sparse_step",
    "moe_layer_freq",
    "first_k_dense_replace",
    "interleave_moe_layer_step",
)
"""Keys of configs that make blocks of a list differ, unless they are empty, 0 or 1."""
REHEARSED = 6
"""Blocks of a list on a stage in a shortened recipe. The fourth is the template: what it uses was made by two before
it (FSDP2 frees the buffer of a gather two blocks later) and the one after it, and the first and last differ."""

Counts = dict[tuple[int, str], int]
"""(stage, module list) -> blocks."""


@dataclass(frozen=True)
class Shortened:
    """Recipes to rehearse in place of one."""

    base: Recipe
    longer: list[Recipe]
    """``base`` with one more block of each extended list of this rank, in the order of ``extended``."""
    extended: list[tuple[int, str]]
    counts: Counts
    """Of the whole model."""

    def series(self, base: Facts) -> list[Series]:
        """How the record of ``base`` is to be extended."""
        return [self._one(base, stage, name) for stage, name in self.extended]

    def paths(self, facts: Facts) -> list[list[str]]:
        """The blocks of each extended list in a record of one of the recipes."""
        return [_paths(facts, stage, name) for stage, name in self.extended]

    def _one(self, base: Facts, stage: int, name: str) -> Series:
        paths = _paths(base, stage, name)
        start = sum(count for (other, list_name), count in self.counts.items() if list_name == name and other < stage)
        count = self.counts[stage, name]
        whole = [f"{name}.{start + place}" for place in range(count)]
        return Series(paths, template=len(paths) // 2, copies=count - len(paths), whole=whole)


def shortened(recipe: Recipe, devices: int, rank: int) -> Shortened | None:
    """What to rehearse in place of ``recipe``; None: the recipe itself, for its blocks are few or not alike."""
    depths = _depths(recipe)
    if depths is None or (recipe.optim.kind == "muon" and sizes(recipe.layout, devices).stage > 1):
        return None  # Muon shares out matrices by their number: what a rank gets does not repeat with the blocks
    cuts = _counts(recipe, devices, depths)
    if cuts is None:
        return None
    own = set(stages_of(recipe, devices, rank))
    counts = {key: count for key, count in cuts.items() if count}
    extended = [key for key, count in counts.items() if key[0] in own and count > REHEARSED + 1]
    if not extended:
        return None
    short = {key: count if key[0] in own else 1 for key, count in counts.items()}
    short |= dict.fromkeys(extended, REHEARSED)
    longer = [_with_counts(recipe, short | {key: REHEARSED + 1}) for key in extended]
    return Shortened(_with_counts(recipe, short), longer, extended, counts)


def whole_sizes(recipe: Recipe) -> StepSizes:
    """The sizes of a step of ``recipe``, which can be shortened, from models with one and two blocks of each list."""
    depths = _depths(recipe)
    assert depths is not None
    few = dict.fromkeys(depths, 1)
    base = asdict(step_sizes(_with_depths(recipe, few)))
    longer = [asdict(step_sizes(_with_depths(recipe, few | {name: 2}))) for name in depths]
    copies = [depth - 1 for depth in depths.values()]
    return StepSizes(**{key: linear(value, [other[key] for other in longer], copies) for key, value in base.items()})


def _paths(facts: Facts, stage: int, name: str) -> list[str]:
    return [p for p in facts.blocks if p.rpartition(".")[0] == name and facts.block_stages[p] == stage]


def _depths(recipe: Recipe) -> dict[str, int] | None:
    """Blocks of each list of the model, by its config; None where they are not known to be alike."""
    model_class: Any = find_class(recipe.model.class_name)
    config = read_config(recipe.model.path, recipe.model.subfolder, recipe.model.config, model_class)
    known: Mapping[str, Any]
    if issubclass(model_class, PreTrainedModel):
        known = model_class.config_class(**{k: v for k, v in config.items() if not k.startswith("_")}).to_dict()
    else:
        known = _defaults(model_class) | config
    if any(known.get(key) not in (None, 0, 1, [], ()) for key in IRREGULAR):
        return None
    if len(set(known.get("layer_types") or ())) > 1:
        return None
    depths = {name: known[key] for name, key in LISTS.items() if name in _lists_of(model_class) and key in known}
    return depths or None


def _defaults(model_class: Any) -> dict[str, Any]:
    return {n: p.default for n, p in inspect.signature(model_class.__init__).parameters.items()}


def _lists_of(model_class: Any) -> tuple[str, ...]:
    """The module lists of a model class."""
    if issubclass(model_class, PreTrainedModel):
        return ("model.layers",)
    if "num_single_layers" in _defaults(model_class):
        return ("transformer.transformer_blocks", "transformer.single_transformer_blocks")
    if model_class.__name__.startswith("Wan"):
        return ("transformer.blocks",)
    return ("transformer.transformer_blocks",)


def stages_of(recipe: Recipe, devices: int, rank: int) -> list[int]:
    """The stages of the whole pipeline that ``rank`` has."""
    layout = recipe.layout
    if layout.pp == 1:
        return [0]
    plan = PipelinePlan(layout.pp_schedule, layout.pp, (1,) * _stages(recipe))
    return plan.stages_of(rank // sizes(layout, devices).stage)


def _stages(recipe: Recipe) -> int:
    layout = recipe.layout
    if layout.pp == 1:
        return 1
    kind = SCHEDULES[layout.pp_schedule]
    own = layout.pp_stages_per_rank
    if own == "auto":
        own = kind.stages_per_rank[0] if kind.stages_per_rank else 2
    return layout.pp * own


def _counts(recipe: Recipe, devices: int, depths: dict[str, int]) -> Counts | None:
    """Blocks of each list on each stage of the whole model, as ``plan_pipeline`` would cut it."""
    if recipe.layout.pp == 1:
        return {(0, name): depth for name, depth in depths.items()}
    stages = _stages(recipe)
    if recipe.layout.pp_cuts is None and sum(depths.values()) < 2 * stages:
        return None
    cuts = recipe.layout.pp_cuts or _balanced(recipe, depths, stages)
    found: Counts = {}
    names = [name for name, depth in depths.items() for _ in range(depth)]
    start = 0
    for stage, number in enumerate(cuts):
        for name in depths:
            found[stage, name] = names[start : start + number].count(name)
        start += number
    return found


def _balanced(recipe: Recipe, depths: dict[str, int], stages: int) -> tuple[int, ...]:
    """The cuts of the whole model, from the costs of one block of each list."""
    module = model_on_meta(_with_depths(recipe, dict.fromkeys(depths, 1))).module
    pipelined = find_pipelined(module)
    each = [matrix_elements([block]) for _, block in pipelined.blocks()]
    costs = BlockCosts(
        entry=matrix_elements(pipelined.ends([*pipelined.recipe.entry])),
        blocks=tuple(cost for cost, depth in zip(each, depths.values(), strict=True) for _ in range(depth)),
        exit=matrix_elements(pipelined.ends([*pipelined.recipe.exit])),
    )
    return balanced_cuts(costs, stages, pipelined.recipe.first_blocks)


def _with_counts(recipe: Recipe, counts: Counts) -> Recipe:
    """``recipe`` with other numbers of blocks on the stages."""
    names = {name for _, name in counts}
    short = _with_depths(recipe, {n: sum(c for (_, other), c in counts.items() if other == n) for n in names})
    if recipe.layout.pp == 1:
        return short
    stages = max(stage for stage, _ in counts) + 1
    cuts = [sum(count for (other, _), count in counts.items() if other == stage) for stage in range(stages)]
    return short.model_copy(update={"layout": recipe.layout.model_copy(update={"pp_cuts": cuts})})


def _with_depths(recipe: Recipe, depths: dict[str, int]) -> Recipe:
    config = dict(recipe.model.config)
    for name, depth in depths.items():
        config[LISTS[name]] = depth
        if LISTS[name] == "num_hidden_layers":
            config |= _layer_lists(recipe, depth)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


def _layer_lists(recipe: Recipe, depth: int) -> dict[str, Any]:
    """Lists in the config that have an entry for each layer, all alike."""
    model_class = find_class(recipe.model.class_name)
    config = read_config(recipe.model.path, recipe.model.subfolder, recipe.model.config, model_class)
    kinds = config.get("layer_types")
    return {"layer_types": [kinds[0]] * depth} if kinds else {}
