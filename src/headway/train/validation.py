"""Which records a validation loss is made of."""

from dataclasses import dataclass

import torch

from headway.data import Collate, Loader, Sample, SampleOrder, Source
from headway.recipe import Recipe


@dataclass(frozen=True)
class CountedUpTo:
    """A collate function whose samples at positions from ``end`` on have no weight: they only fill the last batch."""

    collate: Collate
    end: int

    def __call__(self, samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
        """The tensors of ``collate``, weighted. Draws are those of step 0, so that validations can be compared."""
        tensors = self.collate(samples, positions, 0)
        tensors["weight"] *= torch.tensor([position < self.end for position in positions])
        return tensors


def validation_loader(recipe: Recipe, source: Source, collate: Collate, data_rank: int, data_world: int) -> Loader:
    """At most ``metrics.validation_batches`` global batches, the same ones each time, each record equally often.

    A set smaller than that is passed through as often as it fits (with other noise each time), a larger one is cut.
    """
    size, capacity = len(source), recipe.metrics.validation_batches * recipe.run.global_batch
    end = size * (capacity // size) if size <= capacity else capacity
    batches = -(-end // recipe.run.global_batch)
    return Loader(
        source,
        CountedUpTo(collate, end),
        order=SampleOrder(size, recipe.run.seed, shuffle=False),
        global_batch=recipe.run.global_batch,
        micro_batch=recipe.run.micro_batch,
        data_rank=data_rank,
        data_world=data_world,
        steps=range(batches),
    )
