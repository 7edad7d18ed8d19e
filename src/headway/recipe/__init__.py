"""The typed recipe: what a run computes, from TOML and the command line."""

from headway.recipe.load import known_keys, load_recipe, parse_recipe
from headway.recipe.schema import (
    CheckpointRecipe,
    DataRecipe,
    EmaRecipe,
    FlowMatchingRecipe,
    LatentRecipe,
    LayoutRecipe,
    LoraRecipe,
    MemoryRecipe,
    MetricsRecipe,
    ModelRecipe,
    NextTokenRecipe,
    OptimRecipe,
    PrecisionRecipe,
    Recipe,
    RunRecipe,
    SampleRecipe,
    TextEncoderRecipe,
    VisionLanguageRecipe,
)
from headway.recipe.show import to_toml
from headway.recipe.sizes import Sizes, accumulation, sizes

__all__ = [
    "CheckpointRecipe",
    "DataRecipe",
    "EmaRecipe",
    "FlowMatchingRecipe",
    "LatentRecipe",
    "LayoutRecipe",
    "LoraRecipe",
    "MemoryRecipe",
    "MetricsRecipe",
    "ModelRecipe",
    "NextTokenRecipe",
    "OptimRecipe",
    "PrecisionRecipe",
    "Recipe",
    "RunRecipe",
    "SampleRecipe",
    "Sizes",
    "TextEncoderRecipe",
    "VisionLanguageRecipe",
    "accumulation",
    "known_keys",
    "load_recipe",
    "parse_recipe",
    "sizes",
    "to_toml",
]
