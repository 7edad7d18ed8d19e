"""How many repeated blocks the model of a recipe has, and the recipe with other numbers of them."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from headway.models.classes import find_class, read_config
from headway.recipe import Recipe

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

Depths = dict[str, int]
"""Module list -> blocks, in the order in which they run."""


def depths(recipe: Recipe) -> Depths | None:
    """Blocks of each list of the model, by its config; None where they are not known to be alike.

    Alike: the last block of a list may differ from the others.
    """
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
    found = {name: known[key] for name, key in LISTS.items() if name in _lists_of(model_class) and key in known}
    return found if found and all(found.values()) else None


def with_depths(recipe: Recipe, numbers: Depths) -> Recipe:
    """``recipe`` with so many blocks in its lists."""
    config = dict(recipe.model.config)
    for name, depth in numbers.items():
        config[LISTS[name]] = depth
        if LISTS[name] == "num_hidden_layers":
            config |= _layer_lists(recipe, depth)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


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


def _layer_lists(recipe: Recipe, depth: int) -> dict[str, Any]:
    """Lists in the config that have an entry for each layer, all alike."""
    model_class = find_class(recipe.model.class_name)
    config = read_config(recipe.model.path, recipe.model.subfolder, recipe.model.config, model_class)
    kinds = config.get("layer_types")
    return {"layer_types": [kinds[0]] * depth} if kinds else {}
