"""A non-finite loss or gradient on one rank: all ranks skip the step, name it, and end the run when it goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.data import Batch, Loader, SampleOrder
from headway.errors import RunFailed
from headway.parallel import Ranks
from headway.recipe import Recipe
from headway.train import Trainer, assemble
from ranks import run_ranks
from test_layout_invariance import whole
from tiny_recipes import image_folder, image_recipe


def train_with_poison(recipe: Recipe, poisoned: set[int]) -> dict[str, Any]:
    """Steps with a NaN picture on the last rank at the ``poisoned`` steps: results, events and weights after each."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    parts = assemble(recipe, ranks, recipe.run.directory)
    events: list[tuple[str, dict[str, Any]]] = []
    trainer = Trainer(recipe, parts, lambda: False, lambda kind, **fields: events.append((kind, fields)))
    loader = Loader(
        parts.training_data,
        parts.collate,
        order=SampleOrder(len(parts.training_data), 0, True),
        global_batch=8,
        micro_batch=2,
        data_rank=ranks.rank,
        data_world=ranks.world,
        steps=range(recipe.run.steps),
    )
    results, weights, failure = [], [], None
    for step, batches in enumerate(loader):
        if step in poisoned and ranks.rank == ranks.world - 1:
            batches[-1] = poison(batches[-1])
        try:
            results.append(trainer.step(batches))
            trainer.check_limits()
        except RunFailed as error:
            failure = str(error)
            break
        weights.append(whole(trainer.state()["model"]))
    return {"results": results, "events": events, "weights": weights, "failure": failure}


def poison(batch: Batch) -> Batch:
    tensors = batch.tensors | {"noise": batch.tensors["noise"].clone()}
    tensors["noise"][1, 0, 0, 0] = float("nan")
    return Batch(tensors, batch.positions, batch.bad_records)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    folder = image_folder(tmp_path / "pictures")
    return image_recipe(folder, tmp_path / "run", run={"steps": 5}, optim={"max_skipped_in_a_row": 2})


def test_all_ranks_skip_a_step_that_one_rank_finds_non_finite(recipe: Recipe) -> None:
    for outcome in run_ranks(2, train_with_poison, recipe, {2}):
        assert [result.skipped for result in outcome["results"]] == [False, False, True, False, False]
        weights = outcome["weights"]
        assert equal(weights[1], weights[2])
        assert not equal(weights[2], weights[3])
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights[-1].values())
        fields = next(fields for kind, fields in outcome["events"] if kind == "step_skipped")
        # Step 2 holds positions 16 to 23; the last micro-batch of rank 1 of 2 is 22 and 23.
        assert fields["positions_with_non_finite_loss"] == [22, 23]
        assert fields["positions_of_step"] == [16, 24]


def uncounted(recipe: Recipe) -> list[str]:
    """The reasons of a first step in which no sample counts."""
    parts = assemble(recipe, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")), recipe.run.directory)
    reasons: list[str] = []
    trainer = Trainer(recipe, parts, lambda: False, lambda kind, **fields: reasons.append(fields.get("reason", kind)))
    order = SampleOrder(len(parts.training_data), 0, True)
    (batches,) = Loader(parts.training_data, parts.collate, order=order, global_batch=8, micro_batch=8, steps=range(1))
    batches[0].tensors["weight"].zero_()
    trainer.step(batches)
    return reasons


def test_a_step_in_which_nothing_counts_is_not_called_non_finite(recipe: Recipe) -> None:
    assert run_ranks(1, uncounted, recipe)[0] == ["no sample or token counted"]


def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(recipe: Recipe) -> None:
    for outcome in run_ranks(2, train_with_poison, recipe, {1, 2, 3}):
        assert "2 steps in a row were skipped" in outcome["failure"]
