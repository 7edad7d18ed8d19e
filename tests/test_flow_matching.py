"""Flow matching: draws keyed by sample, closed-form noise levels, and velocities that lead from noise to data."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal

from data_files import picture, read_all, recipe, write_image_folder
from headway.data import Batch, Loader, Sample, SampleOrder, open_sources
from headway.models import BuiltModel, build_model
from headway.parallel import Meshes
from headway.recipe import FlowMatchingRecipe, LayoutRecipe, PrecisionRecipe, SampleRecipe
from headway.train.objectives.flow_matching import (
    FlowMatching,
    FlowMatchingCollate,
    sigma_weight,
    timestep_shift,
    velocity,
)
from headway.train.sampling import Sampler
from ranks import run_ranks
from tiny_models import DIFFUSION, word_tokenizer

MANY = 4096
SHAPE = (12, 8, 8)


def objective_of(**fields: Any) -> FlowMatchingRecipe:
    return FlowMatchingRecipe(kind="flow_matching", **fields)


def build(family: str = "sd3") -> BuiltModel:
    model = DIFFUSION[family]
    tokenizers = {name: word_tokenizer() for name in model.text_encoders}
    built = build_model(model, PrecisionRecipe(compute="float32"), seed=3, tokenizers=tokenizers)
    built.materialize(torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for parameter in built.module.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return built


@pytest.fixture(scope="module")
def built() -> BuiltModel:
    return build()


def frozen_of(built: BuiltModel) -> Any:
    assert built.frozen is not None
    return built.frozen


def collate_of(built: BuiltModel, purpose: str = "train", seed: int = 5, **fields: Any) -> FlowMatchingCollate:
    return FlowMatchingCollate(
        objective=objective_of(**fields),
        seed=seed,
        purpose=purpose,
        latent_shape=SHAPE,
        posterior=True,
        caption_tokens=frozen_of(built).caption_tokens,
    )


def samples_of(positions: Iterable[int], caption: str = "red circle") -> list[Sample]:
    """A picture for each position, the same for the same position."""
    return [Sample(image=pixels(position), caption=caption) for position in positions]


def pixels(number: int, side: int = 16) -> torch.Tensor:
    channels = torch.tensor(list(picture(number, side, side).tobytes()), dtype=torch.uint8)
    return channels.view(side, side, 3).permute(2, 0, 1).contiguous()


DRAWN = ("noise", "posterior_noise", "timestep_draw", "tokens.text_encoder")


@settings(max_examples=25, deadline=None)
@given(positions=st.lists(st.integers(0, 2**40), min_size=1, max_size=5, unique=True), step=st.integers(0, 10**6))
def test_draws_belong_to_a_sample_whatever_batch_it_is_in(built: BuiltModel, positions: list[int], step: int) -> None:
    collate = collate_of(built, condition_dropout=0.5)
    together = collate(samples_of(positions), positions, step)
    for place, position in enumerate(positions):
        alone = collate(samples_of([position]), [position], step)
        assert all(torch.equal(together[name][place], alone[name][0]) for name in DRAWN)


def test_draws_differ_by_seed_stream_position_and_step(built: BuiltModel) -> None:
    draws = {
        (purpose, seed, position, step, name): collate_of(built, purpose, seed)(samples_of([0]), [position], step)[name]
        for purpose, seed, position, step in [
            ("train", 5, 0, 0),
            ("train", 6, 0, 0),
            ("train", 5, 1, 0),
            ("train", 5, 0, 1),
            ("validation", 5, 0, 0),
        ]
        for name in ("noise", "posterior_noise", "timestep_draw")
    }
    values = [tensor.flatten()[0].item() for tensor in draws.values()]
    assert len(set(values)) == len(values)


def test_draws_are_the_same_on_any_ranks_and_micro_batches(built: BuiltModel, tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path, 12)
    data, _ = open_sources(recipe("image_folder", folder, resolution=16), cache=tmp_path, tokenizer=None, seed=0)

    def by_position(micro_batch: int, world: int) -> dict[int, dict[str, torch.Tensor]]:
        found: dict[int, dict[str, torch.Tensor]] = {}
        for rank in range(world):
            loader = Loader(
                data,
                collate_of(built, condition_dropout=0.5),
                order=SampleOrder(len(data), 5, True),
                global_batch=8,
                micro_batch=micro_batch,
                data_rank=rank,
                data_world=world,
                steps=range(3),
            )
            for batch in (batch for batches in loader for batch in batches):
                for place, position in enumerate(batch.positions):
                    found[position] = {name: tensor[place] for name, tensor in batch.tensors.items()}
        return found

    expected = by_position(8, 1)
    assert sorted(expected) == list(range(24))
    for micro_batch, world in ((4, 2), (2, 2), (1, 4)):
        found = by_position(micro_batch, world)
        assert found.keys() == expected.keys()
        for position, tensors in expected.items():
            assert all(torch.equal(found[position][name], tensor) for name, tensor in tensors.items())


def sigmas_of(built: BuiltModel, image_tokens: int = 16, **fields: Any) -> torch.Tensor:
    """Noise levels of positions 0, 1, …"""
    collate = FlowMatchingCollate(objective_of(**fields), 5, "train", (1, 1, 1), False, frozen_of(built).caption_tokens)
    samples = [Sample(image=torch.zeros(3, 1, 1, dtype=torch.uint8), caption="")] * MANY
    draw = collate(samples, list(range(MANY)), 0)["timestep_draw"]
    return FlowMatching(objective_of(**fields), frozen_of(built), image_tokens).sigma(draw)


@pytest.mark.parametrize("shift", [1.0, 3.0, "resolution"])
@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal"])
def test_noise_levels_have_the_distribution_asked_for(built: BuiltModel, timesteps: str, shift: Any) -> None:
    tokens, mean, std = 1024, 0.3, 0.8
    sigma = sigmas_of(built, tokens, timesteps=timesteps, shift=shift, logit_mean=mean, logit_std=std).double()
    assert sigma.min() >= 0
    assert sigma.max() < 1
    factor = math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)) if shift == "resolution" else shift
    unshifted = sigma / (factor - (factor - 1) * sigma)
    expected = unshifted if timesteps == "uniform" else Normal(mean, std).cdf(torch.logit(unshifted))
    # Kolmogorov & Smirnov: a sample of the distribution is farther away once in a hundred times.
    distance = (expected.sort().values - (torch.arange(MANY) + 0.5) / MANY).abs().max()
    assert distance < 1.63 / math.sqrt(MANY)


@pytest.mark.parametrize("tokens", [16, 256, 1024, 4096, 16384])
def test_the_resolution_shift_is_the_pipelines(tokens: int) -> None:
    mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    assert timestep_shift(objective_of(shift="resolution"), tokens) == pytest.approx(math.exp(mu))
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigma = torch.linspace(0.01, 0.99, 9)
    shift = math.exp(mu)
    torch.testing.assert_close(shift * sigma / (1 + (shift - 1) * sigma), scheduler.time_shift(mu, 1.0, sigma))


def test_weightings_are_the_librarys() -> None:
    sigma = torch.linspace(0.02, 0.98, 25)
    for weighting in ("sigma_sqrt", "cosmap", "none"):
        expected = compute_loss_weighting_for_sd3(weighting, sigma)
        torch.testing.assert_close(sigma_weight(objective_of(weighting=weighting), sigma), expected)
    assert sigma_weight(objective_of(weighting="sigma_sqrt"), torch.zeros(1)) == pytest.approx(1e4)


def test_the_fraction_of_captions_asked_for_is_dropped(built: BuiltModel) -> None:
    collate = FlowMatchingCollate(
        objective_of(condition_dropout=0.3), 5, "train", (1, 1, 1), False, frozen_of(built).caption_tokens
    )
    samples = [Sample(image=torch.zeros(3, 1, 1, dtype=torch.uint8), caption="red circle")] * MANY
    batch = collate(samples, list(range(MANY)), 2)
    for name in ("text_encoder", "text_encoder_2"):
        empty, kept = (frozen_of(built).caption_tokens([caption])[name][0] for caption in ("", "red circle"))
        dropped = (batch[f"tokens.{name}"] == empty).all(1)
        assert torch.equal(~dropped, (batch[f"tokens.{name}"] == kept).all(1))
        assert float(dropped.float().mean()) == pytest.approx(0.3, abs=3 * math.sqrt(0.3 * 0.7 / MANY))


def test_captions_are_dropped_always_never_and_not_in_validation(built: BuiltModel) -> None:
    positions = list(range(16))
    empty, kept = (frozen_of(built).caption_tokens([caption] * 16)["text_encoder"] for caption in ("", "red circle"))
    for purpose, dropout, expected in (("train", 1.0, empty), ("train", 0.0, kept), ("validation", 1.0, kept)):
        batch = collate_of(built, purpose, condition_dropout=dropout)(samples_of(positions), positions, 0)
        assert torch.equal(batch["tokens.text_encoder"], expected)


class Perfect(torch.nn.Module):
    """The velocity of a world with one picture for each caption: (noisy - data) / sigma."""

    def __init__(self, data: dict[tuple[int, ...], torch.Tensor]) -> None:
        super().__init__()
        self.data = data
        self.calls: list[tuple[int, float]] = []

    def forward(
        self, noisy: torch.Tensor, sigma: torch.Tensor, tokens: dict[str, torch.Tensor], condition: Any, guidance: float
    ) -> torch.Tensor:
        self.calls.append((len(noisy), guidance))
        data = torch.stack([self.data[tuple(ids.tolist())] for ids in tokens["text_encoder"]])
        return (noisy - data) / sigma.view(-1, 1, 1, 1)


def perfect(built: BuiltModel, pictures: dict[str, torch.Tensor]) -> Perfect:
    frozen = frozen_of(built)
    ids = {caption: tuple(frozen.caption_tokens([caption])["text_encoder"][0].tolist()) for caption in pictures}
    return Perfect({ids[c]: frozen.encode(p[None].float() / 127.5 - 1)[0] for c, p in pictures.items()})


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_the_loss_is_the_weighted_squared_error_of_noise_minus_data(built: BuiltModel, weighting: Any) -> None:
    positions = [3, 4, 5]
    objective = FlowMatching(objective_of(weighting=weighting, shift=2.0), frozen_of(built), 16)
    samples = [Sample(image=pixels(0), caption="red circle") for _ in positions]
    batch = Batch(collate_of(built, condition_dropout=0.0)(samples, positions, 1), positions)
    assert float(objective.loss(perfect(built, {"red circle": pixels(0)}), batch)) == pytest.approx(0.0, abs=1e-6)
    blue = perfect(built, {"red circle": pixels(1)})
    (data,), (wrong,) = perfect(built, {"red circle": pixels(0)}).data.values(), blue.data.values()
    sigma = objective.sigma(batch.tensors["timestep_draw"])
    # Predicting another picture is wrong by (data - other) / sigma.
    expected = sigma_weight(objective.objective, sigma) * sigma.pow(-2) * (data - wrong).square().mean()
    torch.testing.assert_close(objective.loss(blue, batch), expected.sum())
    assert objective.weight(batch) == 3
    assert objective.tokens(batch) == 3 * 16


def draw(guidance: float, distilled: bool) -> tuple[torch.Tensor, list[tuple[int, float]]]:
    built = build()
    model = perfect(built, {"red circle": pixels(0), "": pixels(1), "blue moon": pixels(2)})
    prompts = ["red circle", "blue moon", "red circle"]
    sampler = Sampler(
        SampleRecipe(prompts=prompts, steps=4, guidance=guidance),
        frozen_of(built),
        latent_shape=SHAPE,
        shift=3.0,
        distilled=distilled,
        meshes=Meshes(LayoutRecipe(), torch.distributed.get_rank(), torch.distributed.get_world_size(), "cpu"),
        device=torch.device("cpu"),
        batch=1,
    )
    return sampler.draw(lambda inputs: velocity(model, inputs, guidance)), model.calls


def assert_near(pictures: torch.Tensor, expected: list[torch.Tensor]) -> None:
    """Within one of 255: float32 latents are rounded to bytes."""
    wanted = torch.stack(expected).permute(0, 2, 3, 1)
    assert pictures.shape == wanted.shape
    assert (pictures.int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize(("guidance", "distilled"), [(1.0, False), (3.5, True)])
def test_a_perfect_velocity_leads_from_noise_to_the_data(guidance: float, distilled: bool) -> None:
    """On two ranks; a guidance-distilled model is told its guidance and called once a step, as in its pipeline."""
    for pictures, calls in run_ranks(2, draw, guidance, distilled):
        assert_near(pictures, [pixels(0), pixels(2), pixels(0)])
        assert calls == [(1, guidance)] * 8


def test_guidance_leads_away_from_the_empty_prompt() -> None:
    ((pictures, calls),) = run_ranks(1, draw, 1.5, False)
    apart = [pixels(1).float() + 1.5 * (pixels(n).float() - pixels(1).float()) for n in (0, 2, 0)]
    assert_near(pictures, [wanted.round().clamp(0, 255) for wanted in apart])
    assert calls == [(2, 1.5)] * 12


def test_a_corrupt_sample_weighs_nothing(built: BuiltModel, tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path, 4)
    (folder / "001.png").write_bytes(b"no picture")
    data, _ = open_sources(recipe("image_folder", folder, resolution=16), cache=tmp_path, tokenizer=None, seed=0)
    corrupt = [str(record) for record in read_all(data) if isinstance(record, str)]
    order = SampleOrder(len(data), 0, shuffle=False)
    collate = collate_of(built)
    ((batch,),) = Loader(data, collate, order=order, global_batch=4, micro_batch=4, steps=range(1))
    objective = FlowMatching(objective_of(), frozen_of(built), 16)
    assert batch.bad_records == corrupt
    assert batch.tensors["weight"].tolist().count(0.0) == len(corrupt) == 1
    kept = batch.tensors["weight"] == 1
    rest = Batch({name: t[kept] for name, t in batch.tensors.items()}, [p for p, k in enumerate(kept) if k])
    assert objective.weight(batch) == objective.weight(rest) == 3
    with torch.no_grad():
        torch.testing.assert_close(objective.loss(built.module, batch), objective.loss(built.module, rest))
