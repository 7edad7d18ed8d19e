import sys

import pytest
import torch
from torch import nn

from headway.errors import UserError
from headway.recipe import OptimRecipe
from headway.train.optimizers import build_optimizers, load_optimizer_state, optimizer_state, set_learning_rate
from ranks import run_ranks
from shards import full, masters_of, set_gradients, shard, uneven_model

MATRICES = {"0.weight", "1.weight"}
LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]


def reference(kind: str, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """torch's own optimizers on one device, without sharding."""
    model = uneven_model(dtype=dtype)
    parameters = dict(model.named_parameters())
    decayed = [p for n, p in parameters.items() if p.ndim >= 2 and not (kind == "muon" and n in MATRICES)]
    groups = [{"params": decayed, "weight_decay": 0.1}]
    groups.append({"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0})
    optimizers = [torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False)]
    if kind == "muon":
        matrices = [parameters[name] for name in sorted(MATRICES)]
        optimizers.append(
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.95)
        )
    for step in range(steps):
        set_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return full(parameters)


def recipe(kind: str) -> OptimRecipe:
    return OptimRecipe(kind=kind, lr=0.01, muon_lr=0.02, weight_decay=0.1)


def sharded_steps(kind: str, replicate: int, steps: int, dtype: torch.dtype = torch.float32) -> dict:
    masters = masters_of(shard(uneven_model(dtype=dtype), replicate))
    optimizers = build_optimizers(masters, recipe(kind), MATRICES)
    for step in range(steps):
        set_gradients(masters, step)
        for optimizer in optimizers:
            optimizer.step()
    return full(masters.whole)


@pytest.mark.parametrize(("world", "replicate"), LAYOUTS)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_sharded_updates_equal_those_of_one_device(kind, world, replicate):
    expected = reference(kind, 4)
    for got in run_ranks(world, sharded_steps, kind, replicate, 4):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_bfloat16_master_weights_are_stepped_as_on_one_device():
    expected = reference("adamw", 3, torch.bfloat16)
    got = run_ranks(2, sharded_steps, "adamw", 1, 3, torch.bfloat16)[0]
    for name, value in expected.items():
        assert got[name].dtype == torch.bfloat16
        torch.testing.assert_close(got[name], value, rtol=2**-7, atol=1e-3, msg=name)


def orthogonality_of_shards() -> float:
    masters = masters_of(shard(uneven_model()))
    optimizer = build_optimizers(masters, OptimRecipe(kind="muon", muon_lr=1.0, weight_decay=0.0), {"0.weight"})[0]
    before = full(masters.whole)["0.weight"]
    set_gradients(masters, 0)
    optimizer.step()
    update = before - full(masters.whole)["0.weight"]
    return float(torch.linalg.svdvals(update / (0.2 * 6**0.5)).min())


def test_the_whole_matrix_is_orthogonalised_not_its_shards():
    # Of the rows of two separately orthogonalised shards some are nearly parallel: singular values near 0.
    assert min(run_ranks(2, orthogonality_of_shards)) > 0.5


def groups_of(kind: str) -> list:
    masters = masters_of(shard(uneven_model()))
    names = {shard: name for name, shard in masters.local.items()}
    return [
        (type(optimizer).__name__, group["weight_decay"], sorted(names[p] for p in group["params"]))
        for optimizer in build_optimizers(masters, recipe(kind), MATRICES)
        for group in optimizer.param_groups
    ]


def test_vectors_have_no_weight_decay_and_muon_gets_only_the_named_matrices():
    vectors = [*sorted(f"{i}.bias" for i in range(4)), "2.weight"]
    assert run_ranks(1, groups_of, "muon")[0] == [
        ("ShardedMuon", 0.1, ["0.weight", "1.weight"]),
        ("AdamW", 0.1, ["3.weight"]),
        ("AdamW", 0.0, sorted(vectors)),
    ]
    assert run_ranks(1, groups_of, "adamw")[0][0] == ("AdamW", 0.1, ["0.weight", "1.weight", "3.weight"])


def learning_rates(kind: str) -> list[float]:
    optimizers = build_optimizers(masters_of(shard(uneven_model())), recipe(kind), MATRICES)
    set_learning_rate(optimizers, 0.1)
    set_learning_rate(optimizers, 0.5)
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


def test_the_learning_rate_is_the_factor_times_the_recipe_of_each_optimizer():
    assert run_ranks(1, learning_rates, "muon")[0] == pytest.approx([0.01, 0.005, 0.005])


def state_survives(kind: str) -> tuple[list, list]:
    masters = masters_of(shard(uneven_model()))
    optimizers = build_optimizers(masters, recipe(kind), MATRICES)
    first = {name: full(values) for name, values in optimizer_state(masters, optimizers).items()}
    for step in range(3):
        set_gradients(masters, step)
        for optimizer in optimizers:
            optimizer.step()
    saved = {name: full(values) for name, values in optimizer_state(masters, optimizers).items()}
    fresh = build_optimizers(masters, recipe(kind), MATRICES)
    load_optimizer_state(masters, fresh, optimizer_state(masters, optimizers))
    loaded = {name: full(values) for name, values in optimizer_state(masters, fresh).items()}
    assert all(float(value.abs().sum()) == 0 for values in first.values() for value in values.values())
    return saved, loaded


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_by_parameter_name_starts_at_zero_and_survives_a_new_optimizer(kind):
    saved, loaded = run_ranks(2, state_survives, kind)[0]
    assert saved.keys() == dict(uneven_model().named_parameters()).keys()
    assert saved["3.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(saved["3.weight"]["step"]) == 3
    assert saved["1.weight"]["exp_avg" if kind == "adamw" else "momentum_buffer"].shape == (7, 5)
    for name, values in saved.items():
        for key, value in values.items():
            assert torch.equal(value, loaded[name][key]), (name, key)


def frozen() -> str:
    model = uneven_model().requires_grad_(False)
    with pytest.raises(UserError) as caught:
        build_optimizers(masters_of(shard(model)), OptimRecipe())
    return str(caught.value)


def test_a_model_with_nothing_to_train_is_refused():
    assert "model.freeze" in run_ranks(1, frozen)[0]


def large_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128, bias=False))


def eight_bit(steps: int) -> tuple:
    masters = masters_of(shard(large_model()))
    optimizers = build_optimizers(masters, OptimRecipe(kind="adamw_8bit", lr=0.01, weight_decay=0.1))
    for step in range(steps):
        set_learning_rate(optimizers, 0.5)
        set_gradients(masters, step)
        optimizers[0].step()
    live = optimizers[0].state[masters.local["0.weight"]]["exp_avg"]
    codes, scales = live.codes.clone(), live.scale.clone()
    state = optimizer_state(masters, optimizers)
    load_optimizer_state(masters, optimizers, state)
    assert torch.equal(codes, live.codes)
    assert torch.equal(scales, live.scale)
    assert all(value.dtype == torch.float32 for value in state["0.weight"].values())
    return full(masters.whole), {key: value.shape for key, value in state["0.weight"].items()}


def test_8bit_adamw_follows_adamw_and_its_state_survives_saving_bit_for_bit():
    pytest.importorskip("torchao")
    got, shapes = run_ranks(2, eight_bit, 3, timeout_s=200)[0]
    model = large_model()
    exact = torch.optim.AdamW(model.parameters(), lr=0.005, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        set_gradients(model, step)
        exact.step()
    assert shapes == {"step": (), "exp_avg": (128, 64), "exp_avg_sq": (128, 64)}
    with torch.no_grad():
        moved = (model[0].weight - large_model()[0].weight).abs().mean()
        error = (got["0.weight"] - model[0].weight).abs().mean()
    assert float(error / moved) < 0.02


def without_torchao() -> str:
    sys.modules["torchao.optim"] = None
    with pytest.raises(UserError) as caught:
        build_optimizers(masters_of(shard(uneven_model())), OptimRecipe(kind="adamw_8bit"))
    return str(caught.value)


def test_8bit_adamw_without_torchao_says_what_to_install():
    assert "headway[low-precision]" in run_ranks(1, without_torchao)[0]
