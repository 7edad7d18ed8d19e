"""This rank's micro-batches of a run's steps."""

from headway.data import Loader, SampleOrder
from headway.recipe import Recipe
from headway.train.assembly import Assembly


def training_loader(
    recipe: Recipe,
    parts: Assembly,
    steps: range,
    *,
    start_position: int = 0,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> Loader:
    """The loader of ``steps``; ``start_position`` is the global sample index of the first of them.

    ``workers``: processes that read ahead, ``prefetch`` steps each; 0 reads in this one.
    """
    return Loader(
        parts.training_data,
        parts.collate,
        order=SampleOrder(len(parts.training_data), recipe.run.seed, recipe.data.shuffle),
        global_batch=recipe.run.global_batch,
        micro_batch=recipe.run.micro_batch,
        data_rank=parts.meshes.data_rank,
        data_world=parts.meshes.sizes.data,
        steps=steps,
        start_position=start_position,
        workers=workers,
        prefetch=prefetch,
        pin_memory=pin_memory,
    )
