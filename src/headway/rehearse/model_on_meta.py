"""A recipe's model without values, from its config alone."""

import torch

from headway.models import BuiltModel, build_model
from headway.recipe import Recipe
from headway.train.unread_batches import unread_tokenizers


def model_on_meta(recipe: Recipe) -> BuiltModel:
    """Whole, on the meta device; no weights, data or tokenizers are read. Raises UserError for what can't be built."""
    return build_model(
        recipe.model,
        recipe.precision,
        seed=recipe.run.seed,
        tokenizers=unread_tokenizers(recipe),
        placeholder=lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
    )
