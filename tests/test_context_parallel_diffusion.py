"""Denoisers whose pictures and videos several ranks share compute what one device does, to the last gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from context_parallel_runs import KINDS, Case, Result, Sharded, assert_same_gradients, build, gradient_errors, parts
from headway.errors import UserError
from headway.kernels.fusion import fuse
from headway.parallel.context_parallel import apply_context_parallel_diffusion, check_context_parallel
from headway.recipe import ModelRecipe
from ranks import run_ranks
from soak import soak
from tiny_models import DIFFUSION


def with_config(name: str, **config: Any) -> ModelRecipe:
    recipe = DIFFUSION[name]
    return recipe.model_copy(
        update={"config": recipe.config | {"num_attention_heads": 4, "attention_head_dim": 8} | config}
    )


MODELS = {
    "flux": with_config("flux", axes_dims_rope=[2, 2, 4]),
    "sd3": with_config("sd3", dual_attention_layers=[0], caption_projection_dim=32),
    "wan": with_config("wan"),
    "pixart": with_config("pixart"),
}
TEXT = 5
"""Tokens of a caption: odd, as the pictures' 15 and the video's 45 tokens are."""


def loss_sum(model: Any, number: int, split: None, text: int = TEXT) -> Tensor:
    """Weighted squared errors of the velocity of a picture of 6 x 10 latents, or of three such frames."""
    generator = torch.Generator().manual_seed(number)
    video = (3,) if model.family.video else ()
    noisy, target = (torch.randn(2, 12, *video, 6, 10, generator=generator) for _ in range(2))
    tokens = {name: torch.randint(4, 14, (2, text), generator=generator) for name in model.text_encoders}
    timestep = torch.rand(2, generator=generator)
    velocity = model(noisy, timestep, tokens, {}, guidance=3.0)
    weight = torch.tensor([1.0, 0.3 + number])
    return ((velocity - target).square().flatten(1).mean(1) * weight).sum()


def apply(model: nn.Module, cp: DeviceMesh) -> None:
    apply_context_parallel_diffusion(model.transformer, cp)


LOSSES = {"text": loss_sum, "three tokens of text": partial(loss_sum, text=3)}
"""With fewer tokens of text than ranks, some ranks have none."""


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: Case(recipe) for name, recipe in MODELS.items()}


@pytest.fixture(scope="module")
def references(cases: dict[str, Case]) -> dict[tuple[str, str], Result]:
    return {(name, kind): case.reference(loss, 1) for name, case in cases.items() for kind, loss in LOSSES.items()}


def every_rank_has_the_loss(results: list[Result], expected: Result) -> None:
    assert [result["loss"] for result in results] == pytest.approx([expected["loss"]] * len(results), rel=1e-6)


@pytest.mark.parametrize("kind", [soak(k) if k in ("ring 4", "ulysses 4") else k for k in KINDS])
def test_ranks_of_one_picture_have_parts_of_what_one_device_computes(
    kind: str, cases: dict[str, Case], references: dict[tuple[str, str], Result]
) -> None:
    results = run_ranks(KINDS[kind]["cp"], parts, cases, LOSSES, apply, KINDS[kind])
    for case, expected in references.items():
        every_rank_has_the_loss([result[case] for result in results], expected)
        assert_same_gradients(results[0][case], expected, of=case)


@pytest.mark.parametrize(
    ("name", "kind", "checkpointing"),
    [
        ("wan", "ulysses 2", "none"),
        ("wan", "ring 2", "full"),
        ("sd3", "ring 2", "selective"),
        ("flux", "ulysses 2", "full"),
    ],
)
def test_parameters_sharded_over_the_ranks_of_a_picture(
    name: str, kind: str, checkpointing: str, cases: dict[str, Case]
) -> None:
    expected = cases[name].reference(loss_sum, 2)
    results = run_ranks(2, Sharded(apply, KINDS[kind], checkpointing), cases[name], loss_sum)
    every_rank_has_the_loss(results, expected)
    assert_same_gradients(results[1], expected)


def apply_fused(model: nn.Module, cp: DeviceMesh) -> None:
    fuse(model.transformer)
    apply(model, cp)


@pytest.mark.parametrize("name", ["flux", "wan", soak("sd3")])
def test_ranks_share_a_picture_with_fused_operators_too(name: str, cases: dict[str, Case]) -> None:
    expected = cases[name].reference(loss_sum, 2)
    results = run_ranks(2, Sharded(apply_fused, KINDS["ulysses 2"], "full"), cases[name], loss_sum)
    every_rank_has_the_loss(results, expected)
    assert_same_gradients(results[1], expected)


def test_two_data_ranks_of_two_context_ranks(cases: dict[str, Case]) -> None:
    expected = cases["flux"].reference(loss_sum, 4)
    results = run_ranks(4, Sharded(apply, KINDS["ulysses 2"], "full"), cases["flux"], loss_sum)
    assert results[0]["loss"] == results[1]["loss"]
    assert results[1]["loss"] + results[2]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert_same_gradients(results[3], expected)


def test_an_average_over_the_ranks_of_a_picture_is_found_out(cases: dict[str, Case]) -> None:
    averaged = run_ranks(2, Sharded(apply, KINDS["ulysses 2"], factor=1.0), cases["wan"], loss_sum)[0]
    assert min(gradient_errors(averaged, cases["wan"].reference(loss_sum, 2)).values()) > 0.4


def test_models_that_cannot_are_refused_with_what_can() -> None:
    flux = build(DIFFUSION["flux"]).module.transformer
    with pytest.raises(UserError, match=r'all-to-all of 4 ranks .* 2 heads.*"ring" or "both" with .*cp_ulysses = 2'):
        check_context_parallel(flux, ring=1, ulysses=4)
    with pytest.raises(UserError, match=r"1 heads of 2 that layout.tp = 2"):
        check_context_parallel(flux, ring=1, ulysses=2, tp=2)
    check_context_parallel(flux, ring=4, ulysses=2)
    with pytest.raises(UserError, match="SanaTransformer2DModel: its linear attention"):
        check_context_parallel(build(DIFFUSION["sana"]).module.transformer, ring=2, ulysses=1)
