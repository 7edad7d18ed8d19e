"""Laws 1, 3 and 4: the same recipe computes the same numbers on any ranks, micro-batches and data-parallel layout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headway.parallel import Ranks
from headway.recipe import Recipe
from headway.train import Trainer, assemble, training_loader
from ranks import run_ranks
from soak import soak
from tiny_recipes import image_folder, image_recipe, text_file, text_recipe


def train(recipe: Recipe) -> dict[str, Any]:
    """All steps of ``recipe`` on this rank: losses, gradient norms, then weights and averages whole."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    parts = assemble(recipe, ranks, recipe.run.directory)
    trainer = Trainer(recipe, parts, lambda: False, lambda kind, **fields: None)
    results = [trainer.step(batches) for batches in training_loader(recipe, parts, range(recipe.run.steps))]
    state = trainer.state()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "tokens": [result.tokens for result in results],
        "model": whole(state["model"]),
        "ema": whole(state["ema"]["0.9"]),
    }


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def relative(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> float:
    first, second = torch.cat([t.flatten() for t in first]), torch.cat([t.flatten() for t in second])
    return float((first - second).norm() / second.norm())


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["model"].keys() == expected["model"].keys()
    for part in ("model", "ema"):
        assert relative(found[part].values(), expected[part].values()) < 1e-4


LAYOUTS = {
    "2 ranks FSDP2": (2, {"micro_batch": 4}, {"dp_shard": 2}),
    "2 ranks FSDP2, accumulation 2": (2, {"micro_batch": 2}, {"dp_shard": 2}),
    "2 ranks DDP, accumulation 4": (2, {"micro_batch": 1}, {"dp_replicate": 2, "dp_shard": 1}),
    "4 ranks HSDP": (4, {"micro_batch": 1}, {"dp_replicate": 2, "dp_shard": 2}),
    "1 rank, accumulation 8": (1, {"micro_batch": 1}, {}),
}

DEAR = ("2 ranks FSDP2", "2 ranks FSDP2, accumulation 2")
"""The same on pictures, or with accumulation over replicas, is in the suite."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    image_folder(folder / "pictures")
    text_file(folder / "text.jsonl")
    return folder


def recipe_of(kind: str, folder: Path, directory: Path, **sections: dict[str, Any]) -> Recipe:
    if kind == "image":
        return image_recipe(folder / "pictures", directory, **sections)
    return text_recipe(folder / "text.jsonl", directory, **sections)


@pytest.fixture(scope="module")
def references(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {
        kind: run_ranks(1, train, recipe_of(kind, data, tmp_path_factory.mktemp("run"), run={"micro_batch": 8}))[0]
        for kind in ("image", "text")
    }


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "text") for layout in LAYOUTS if layout not in DEAR),
        *(soak(layout, "text") for layout in DEAR),
        ("2 ranks FSDP2, accumulation 2", "image"),
        *(soak(layout, "image") for layout in LAYOUTS if layout != "2 ranks FSDP2, accumulation 2"),
    ],
)
def test_every_data_parallel_layout_computes_what_one_device_does(
    layout: str, kind: str, references: dict[str, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    world, run, mesh = LAYOUTS[layout]
    results = run_ranks(world, train, recipe_of(kind, data, tmp_path, run=run, layout=mesh))
    for result in results:
        assert_same_run(result, references[kind])


@pytest.mark.parametrize("mode", [soak("full"), "selective"])
def test_activation_checkpointing_changes_no_number(
    mode: str, references: dict[str, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    memory = {"activation_checkpointing": mode}
    result = run_ranks(2, train, recipe_of("text", data, tmp_path, run={"micro_batch": 4}, memory=memory))[0]
    assert_same_run(result, references["text"])


def test_the_loss_falls(references: dict[str, dict[str, Any]]) -> None:
    for reference in references.values():
        assert sum(reference["losses"][-4:]) < 0.9 * sum(reference["losses"][:4])


def test_documents_of_unequal_length_weigh_by_their_tokens(data: Path, tmp_path: Path) -> None:
    """One document a sample: ranks and micro-batches hold very unequal numbers of tokens that count."""
    unpacked = {"packing": False}
    run = {"steps": 5, "micro_batch": 8}
    reference = run_ranks(1, train, recipe_of("text", data, tmp_path / "1", run=run, data=unpacked))[0]
    split = recipe_of("text", data, tmp_path / "2", run={"steps": 5, "micro_batch": 1}, data=unpacked)
    assert_same_run(run_ranks(2, train, split)[0], reference)


def test_compiled_blocks_compute_what_eager_ones_do(data: Path, tmp_path: Path) -> None:
    """Compiled, checkpointed and sharded on two ranks."""
    run = {"steps": 3, "micro_batch": 4}
    eager = run_ranks(2, train, recipe_of("text", data, tmp_path / "eager", run=run))[0]
    memory = {"activation_checkpointing": "selective"}
    compiled = recipe_of("text", data, tmp_path / "compiled", run=run | {"compile": True}, memory=memory)
    assert_same_run(run_ranks(2, train, compiled)[0], eager)
