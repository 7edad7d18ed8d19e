"""A model without its adapters: the class that the library saves."""

from typing import Any

from torch import device

from headway.models import merge_lora
from headway.recipe import LoraRecipe


def without_adapters(module: Any, recipe: LoraRecipe | None) -> Any:
    """The module itself, or a new one of its class with the adapters merged into its weights."""
    if recipe is None:
        return module
    with device("meta"):
        bare = (
            type(module)(module.config) if hasattr(module.config, "model_type") else module.from_config(module.config)
        )
    bare.load_state_dict(merge_lora(module.state_dict(), recipe), assign=True)
    if hasattr(bare, "tie_weights"):
        bare.tie_weights()
    return bare
