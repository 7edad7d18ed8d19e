"""bfloat16 weights trained with stochastic rounding: the same bits on every layout, also after a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from headway.errors import UserError
from headway.parallel import Masters, Ranks, own_piece
from headway.recipe import OptimRecipe, parse_recipe
from headway.rehearse import rehearse_whole
from headway.train import Trainer, assemble, training_loader
from headway.train.optimizers import build_optimizers, load_optimizer_state, optimizer_state
from ranks import run_ranks
from shards import full, masters_of, set_gradients, shard, uneven_model
from tiny_recipes import text_file, text_recipe

BFLOAT16 = {"master": "bfloat16", "compute": "bfloat16", "stochastic_rounding": True}
OPTIM = OptimRecipe(lr=0.01, weight_decay=0.1)


def average_of(masters: Masters) -> list[torch.Tensor]:
    return [shard.detach().float() for shard in masters.local.values()]


def stepped(replicate: int, steps: int, broken: bool = False) -> tuple[dict, dict, dict]:
    """Weights, moments and an average after ``steps``; ``broken``: by an optimizer that took over in the middle."""
    masters = masters_of(shard(uneven_model(dtype=torch.bfloat16), replicate))
    (optimizer,) = build_optimizers(masters, OPTIM, rounding_seed=3)
    average = average_of(masters)
    for step in range(steps):
        if broken and step == steps // 2:
            state = optimizer_state(masters, [optimizer])
            (optimizer,) = build_optimizers(masters, OPTIM, rounding_seed=3)
            load_optimizer_state(masters, [optimizer], state)
        set_gradients(masters, step)
        optimizer.update(step, 0.5, [(average, 0.25)])
    moments = {name: full(values) for name, values in optimizer_state(masters, [optimizer]).items()}
    averages = {name: masters.like(name, mean) for name, mean in zip(masters.local, average, strict=True)}
    return full(masters.whole), moments, full(averages)


@pytest.mark.parametrize(("world", "replicate", "broken"), [(2, 1, False), (3, 1, True), (4, 2, False)])
def test_shards_are_stepped_to_the_bits_of_one_device(world, replicate, broken):
    (expected,) = run_ranks(1, stepped, 1, 4)
    assert expected[1]["0.weight"]["exp_avg"].dtype == torch.float32
    for found in run_ranks(world, stepped, replicate, 4, broken):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def without_a_gradient() -> None:
    masters = masters_of(shard(uneven_model(dtype=torch.bfloat16)))
    (optimizer,) = build_optimizers(masters, OPTIM, rounding_seed=0)
    average = average_of(masters)
    set_gradients(masters, 0)
    (still, mean), moved = (masters.local["1.bias"], average[3]), masters.local["0.weight"]
    still.grad = None
    before, mean_before = (still.clone(), moved.clone()), mean.clone().mul_(2)
    mean.mul_(2)
    optimizer.update(0, 1.0, [(average, 0.5)])
    assert torch.equal(still, before[0])
    assert not torch.equal(moved, before[1])
    torch.testing.assert_close(mean, (mean_before + still.float()) / 2)
    with pytest.raises(TypeError):
        optimizer.step()


def test_a_parameter_without_a_gradient_stays_and_its_average_follows():
    run_ranks(1, without_a_gradient)


def trained(recipe: Any, resume: bool = False) -> tuple[list[float], dict]:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))

    def trainer_of() -> Trainer:
        parts = assemble(recipe, ranks, recipe.run.directory)
        return Trainer(recipe, parts, lambda: False, lambda kind, **fields: None)

    trainer = trainer_of()
    losses = []
    for number, batches in enumerate(training_loader(recipe, trainer.parts, range(recipe.run.steps))):
        if resume and number == 2:
            saved, trainer = trainer.state(), trainer_of()

            def load(state: dict, saved: dict = saved) -> None:
                _copy(state, saved)

            trainer.restore(load)
        losses.append(trainer.step(batches).loss)
    state = trainer.state()
    return losses, full(state["model"]) | {f"mean {n}": t for n, t in full(state["ema"]["0.9"]).items()}


@torch.no_grad()
def _copy(into: dict, source: dict) -> None:
    for key, value in source.items():
        if isinstance(value, dict):
            _copy(into[key], value)
        elif isinstance(value, torch.Tensor):
            into[key].copy_(value)
        else:
            into[key] = value


def test_a_run_learns_resumes_to_the_bit_and_is_alike_on_two_ranks(tmp_path: Path):
    file = text_file(tmp_path / "text.jsonl")
    sections = {"run": {"steps": 5, "micro_batch": 4}, "precision": BFLOAT16, "optim": {"lr": 3e-3}}
    recipe = text_recipe(file, tmp_path / "run", **sections)
    (whole,) = run_ranks(1, trained, recipe)
    (resumed,) = run_ranks(1, trained, recipe, True)
    assert whole[0] == resumed[0]
    torch.testing.assert_close(whole[1], resumed[1], rtol=0, atol=0)
    assert whole[0][-1] < whole[0][0]
    for losses, _ in run_ranks(2, trained, recipe):
        assert losses == pytest.approx(whole[0], rel=1e-2)  # gradients are bfloat16 sums in another order


def whole_matrix(name: str, step: int) -> torch.Tensor:
    """The gradient of a parameter of 12 rows and 8 columns in a step, and before the first its value."""
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(1000 * (step + 1) + ord(name[0]))).bfloat16()


def stepped_matrices(divided: bool, steps: int) -> dict[str, torch.Tensor]:
    """Two matrices; ``divided``: the rows of one and the columns of the other over tensor parallelism, then by FSDP."""
    shards, parts = (2, 2) if divided else (1, 1)
    mesh = init_device_mesh("cpu", (shards, parts), mesh_dim_names=("shard", "tp"))
    layers = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False))
    for number, layer in enumerate(layers):
        value = whole_matrix(f"{number}.weight", -1)
        if divided:
            value = distribute_tensor(value, mesh["tp"], [Shard(number)], src_data_rank=None)
        layer.weight = nn.Parameter(value)
    masters = masters_of(fully_shard(layers, mesh=mesh["shard"]))
    (optimizer,) = build_optimizers(masters, OPTIM, rounding_seed=3)
    for step in range(steps):
        for name, local in masters.local.items():
            local.grad = whole_matrix(name, step)[own_piece(masters.whole[name]).index()].contiguous()
        optimizer.update(step, 1.0)
    return full(masters.whole)


def test_parts_of_rows_and_columns_round_with_the_numbers_of_the_whole():
    (alone,) = run_ranks(1, stepped_matrices, False, 3)
    for found in run_ranks(4, stepped_matrices, True, 3):
        torch.testing.assert_close(found, alone, rtol=0, atol=0)


def test_a_rehearsal_sees_one_pass_over_the_weights(tmp_path: Path) -> None:
    recipe = text_recipe(text_file(tmp_path / "text.jsonl"), tmp_path / "run", precision=BFLOAT16)
    operators = [operator.name for operator in rehearse_whole(recipe, 1, 0).operators]
    updates = [name for name in operators if name.startswith("headway.adamw")]
    assert len(updates) == 2  # matrices with weight decay, and vectors without
    assert not any("fused_adamw" in name or "lerp" in name for name in operators)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"precision": {"master": "float32", "stochastic_rounding": True}}, 'master = "bfloat16"'),
        ({"precision": BFLOAT16, "optim": {"kind": "muon"}}, 'optim.kind = "adamw"'),
    ],
)
def test_what_has_no_stochastic_rounding_is_refused(sections, said, tmp_path):
    with pytest.raises(UserError, match=said):
        text_recipe(tmp_path / "text.jsonl", tmp_path / "run", **sections)


def test_the_recipe_rounds_to_nearest_unless_it_says_otherwise(tmp_path):
    plain = text_recipe(tmp_path / "text.jsonl", tmp_path / "run").model_dump(mode="json")
    assert parse_recipe(plain, source="dumped").precision.stochastic_rounding is False
