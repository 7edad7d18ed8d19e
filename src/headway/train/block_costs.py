"""What each block of a model, and what comes before and after them, costs a pipeline's stages: FLOPs of a sample."""

from typing import Any

import torch
from torch import Tensor

from headway.errors import UserError
from headway.models import BuiltModel
from headway.parallel.pipeline import BlockCosts
from headway.parallel.pipeline.families import find_pipelined
from headway.recipe import Recipe
from headway.train.flops import count_flops_of_parts, on_meta, run_on_meta
from headway.train.objectives.objective import Objective
from headway.train.unread_batches import rehearsed_batch


def block_costs(recipe: Recipe, built: BuiltModel, objective: Objective[Any]) -> BlockCosts:
    """Forward and backward of one sample of the shapes of ``recipe``, and what checkpointing computes again.

    ``built`` is whole and on meta; ``objective`` is that on a plain model. Counted from the program itself: what an
    expert is not chosen for, or a row of an embedding that is looked up, costs nothing, and attention costs what the
    length of its sequence makes it. Frozen parts, which every stage runs, are left out.

    Raises UserError for a model that can't be cut into stages, or does not run on meta.
    """
    blocks = [block for _, block in find_pipelined(built.module).blocks()]
    one = recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"micro_batch": 1}),
            "data": recipe.data.model_copy(update={"packing": False}),  # a mask of documents would count as much
        }
    )
    batch = rehearsed_batch(one, built, _empty)
    batch.tensors = on_meta(batch.tensors)
    try:
        prepared = run_on_meta(lambda: objective.prepare(batch))
        parts = count_flops_of_parts(
            lambda: objective.loss_of(objective.predict(built.module, prepared), prepared), built.module, blocks
        )
    except Exception as error:  # any model's code may refuse to run on meta
        raise UserError(
            f"layout.pp: what blocks of {recipe.model.class_name} cost can't be counted ({error}): say how many each "
            "stage has in layout.pp_cuts"
        ) from error
    again = recipe.memory.activation_checkpointing == "full"
    entry, *inner, exit = ([part.model, part.forward] for part in parts)
    return BlockCosts(
        entry=float(entry[0]),
        blocks=tuple(float(model + again * forward) for model, forward in inner),
        exit=float(exit[0]),
    )


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
