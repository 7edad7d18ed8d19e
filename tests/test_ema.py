import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from headway.errors import UserError
from headway.parallel import FullyShardedModel, Masters
from headway.recipe import EmaRecipe
from headway.train.ema import Ema
from ranks import run_ranks
from shards import full, shard, uneven_model

LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 2)]
DECAYS = [0.5, 0.999]


def weights_after(step: int, name: str, shape: torch.Size) -> torch.Tensor:
    """What training would have left: any numbers, the same on every layout."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 100 + sum(map(ord, name))))


@torch.no_grad()
def set_weights(model: torch.nn.Module, step: int) -> None:
    for name, p in model.named_parameters():
        whole = weights_after(step, name, p.shape).to(p.dtype)
        p.to_local().copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local())


def ema_of(model: torch.nn.Module, recipe: EmaRecipe) -> Ema:
    laid_out = FullyShardedModel(model)
    return Ema(Masters(laid_out.parameters(), dist.get_world_size()), laid_out, recipe)


def reference(recipe: EmaRecipe, steps: int, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """The formula written out, tensor by tensor, on one device."""
    result = {}
    for decay in recipe.decays:
        averages = {name: p.detach().float().clone() for name, p in uneven_model(dtype=dtype).named_parameters()}
        for step in range(steps):
            if (step + 1) % recipe.every == 0:
                d = (min(decay, (1 + step) / (10 + step)) if recipe.warmup else decay) ** recipe.every
                for name, average in averages.items():
                    average.mul_(d).add_(weights_after(step, name, average.shape).to(dtype).float(), alpha=1 - d)
        result[str(decay)] = averages
    return result


def averaged(replicate: int, recipe: EmaRecipe, steps: int, dtype: torch.dtype) -> dict:
    model = shard(uneven_model(dtype=dtype), replicate)
    ema = ema_of(model, recipe)
    for step in range(steps):
        set_weights(model, step)
        ema.update(step)
    state = ema.state_dict()
    parameters = dict(model.named_parameters())
    for averages in state.values():
        for name, average in averages.items():
            assert average.dtype == torch.float32
            assert average.shape == parameters[name].shape
            assert average.stride() == parameters[name].stride()
            assert average.placements == parameters[name].placements
    return {decay: full(averages) for decay, averages in state.items()}


@pytest.mark.parametrize(("world", "replicate"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_of_shards_equal_those_of_one_device(world, replicate, dtype):
    recipe = EmaRecipe(decays=DECAYS)
    expected = reference(recipe, 12, dtype)
    for got in run_ranks(world, averaged, replicate, recipe, 12, dtype):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [True, False])
def test_every_skips_steps_and_keeps_the_horizon(warmup):
    recipe = EmaRecipe(decays=[0.9], every=3, warmup=warmup)
    got = run_ranks(2, averaged, 1, recipe, 11, torch.float32)[0]
    torch.testing.assert_close(got, reference(recipe, 11, torch.float32), rtol=1e-5, atol=1e-6)


def forward_equals_plain_model(replicate: int, dtype: torch.dtype) -> None:
    model = shard(uneven_model(dtype=dtype), replicate)
    ema = ema_of(model, EmaRecipe(decays=DECAYS))
    set_weights(model, 0)
    ema.update(0)
    set_weights(model, 1)
    trained = {name: p.to_local().clone() for name, p in model.named_parameters()}
    pictures = torch.randn(3, 6, generator=torch.Generator().manual_seed(5)).to(dtype)
    plain = uneven_model(dtype=dtype)
    for decay in DECAYS:
        plain.load_state_dict({name: value.to(dtype) for name, value in full(ema.state_dict()[str(decay)]).items()})
        with torch.no_grad():
            live = model(pictures)  # leaves gathered parameters behind in the root
            with ema.swapped_in(decay):
                torch.testing.assert_close(model(pictures), plain(pictures))
            assert torch.equal(model(pictures), live)
    with pytest.raises(ZeroDivisionError), ema.swapped_in(0.5):
        _ = 1 / 0
    model(pictures).sum().backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), trained[name]), name


@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (3, 1), (4, 2)])
def test_swapped_in_averages_are_computed_with_and_the_weights_come_back_bit_for_bit(world, replicate):
    run_ranks(world, forward_equals_plain_model, replicate, torch.float32)


def test_bfloat16_weights_come_back_bit_for_bit():
    run_ranks(2, forward_equals_plain_model, 1, torch.bfloat16)


def state_moves() -> None:
    model = shard(uneven_model())
    ema, other = ema_of(model, EmaRecipe(decays=DECAYS)), ema_of(model, EmaRecipe(decays=DECAYS))
    set_weights(model, 0)
    ema.update(0)
    other.load_state_dict(ema.state_dict())
    torch.testing.assert_close(
        [full(averages) for averages in other.state_dict().values()],
        [full(averages) for averages in ema.state_dict().values()],
        rtol=0,
        atol=0,
    )
    with pytest.raises(UserError, match=r"0\.9"), ema.swapped_in(0.9):
        pass
    with pytest.raises(UserError, match="decays"):
        other.load_state_dict({"0.9": {}})
    empty = ema_of(model, EmaRecipe())
    empty.update(0)
    assert empty.state_dict() == {}


def test_state_is_taken_over_and_unknown_decays_are_refused():
    run_ranks(2, state_moves)


def frozen_parameters_have_no_average() -> list[str]:
    model = uneven_model()
    model[0].requires_grad_(False)
    return sorted(ema_of(shard(model), EmaRecipe(decays=[0.9])).state_dict()["0.9"])


def test_only_trained_parameters_are_averaged():
    names = run_ranks(1, frozen_parameters_have_no_average)[0]
    assert names == sorted(name for name, _ in uneven_model().named_parameters() if not name.startswith("0."))


def updates_without_communication() -> int:
    model = shard(uneven_model())
    ema = ema_of(model, EmaRecipe(decays=DECAYS))
    if dist.get_rank() == 0:  # a collective would wait for the other rank and fail
        for step in range(3):
            ema.update(step)
    dist.barrier()
    return 1


def test_an_update_needs_no_other_rank():
    assert run_ranks(2, updates_without_communication, timeout_s=20) == [1, 1]
