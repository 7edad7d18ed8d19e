"""What a step is of: samples, tokens, parameters, and the floating-point operations that the Trainer counts."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headway.recipe import LayoutRecipe, Recipe
from headway.rehearse.model_on_meta import model_on_meta
from headway.train.assembly import flops_of, objective_of
from headway.train.unread_batches import rehearsed_batch


@dataclass(frozen=True)
class StepSizes:
    """Of one micro-batch, and of the whole model."""

    tokens: int
    """That the model sees of a micro-batch, padding included."""
    model_flops: int
    """Forward and backward of a micro-batch."""
    recomputed_flops: int
    parameters: int
    trained_parameters: int


def step_sizes(recipe: Recipe) -> StepSizes:
    """Counted on meta tensors, whatever the layout. Raises UserError for what can't be built."""
    return _counted(recipe.model_copy(update={"layout": LayoutRecipe()}).model_dump_json())


@lru_cache(maxsize=64)
def _counted(document: str) -> StepSizes:
    recipe = Recipe.model_validate_json(document)
    copy = model_on_meta(recipe)
    if copy.frozen is not None:
        copy.frozen.materialize(torch.device("meta"))
    batch = rehearsed_batch(recipe, copy, _on_meta)
    parameters = list(copy.module.parameters())
    flops = flops_of(recipe, copy)(batch.tensors)
    assert flops is not None
    return StepSizes(
        tokens=objective_of(recipe, copy).tokens(batch),
        model_flops=flops.model,
        recomputed_flops=flops.recomputed,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    )


def _on_meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
