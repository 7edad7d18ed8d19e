"""What a denoiser is fed in training is what its diffusers pipeline feeds it, bit for bit."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from headway.errors import UserError
from headway.models import FAMILIES, BuiltModel, build_model
from headway.models.families import flux
from headway.recipe import ModelRecipe, PrecisionRecipe
from tiny_models import DIFFUSION, t5, word_tokenizer

CPU = torch.device("cpu")
# PixArt's pipeline reads init_noise_sigma, which the flow-matching Euler scheduler does not have.
SCHEDULERS = {
    "pixart": DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
}
CAPTIONS = ["a Red heart", "blue square on a green circle of a moon"]
SD3_T5 = DIFFUSION["sd3"].model_copy(
    update={"text_encoders": DIFFUSION["sd3"].text_encoders | {"text_encoder_3": t5(width=64)}}
)
MODELS = DIFFUSION | {"sd3-t5": SD3_T5}


def build(recipe: ModelRecipe) -> BuiltModel:
    tokenizers = {name: word_tokenizer() for name in recipe.text_encoders}
    built = build_model(recipe, PrecisionRecipe(compute="float32"), seed=0, tokenizers=tokenizers)
    built.materialize(CPU)
    generator = torch.Generator().manual_seed(7)
    for parameter in built.module.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return built


def pipeline_of(built: BuiltModel) -> Any:
    """The family's own pipeline around our modules."""
    assert built.frozen is not None
    family = built.frozen.family
    module: Any = built.module
    components: dict[str, Any] = {
        "transformer": module.transformer,
        "scheduler": SCHEDULERS.get(family.name, FlowMatchEulerDiscreteScheduler()),
    }
    for name in (*family.required_encoders, *family.optional_encoders):
        components[name] = dict(module.text_encoders).get(name)
        tokenizer = name.replace("text_encoder", "tokenizer")
        components[tokenizer] = built.frozen.caption_tokens.tokenizers.get(name)
    pipeline = getattr(diffusers, family.pipeline_class)(vae=None, **components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Recorder:
    """Stands before the pipeline's denoiser, keeps what it is fed and answers."""

    def __init__(self, transformer: Any) -> None:
        self.calls: list[tuple[Any, torch.Tensor]] = []
        self._hook = transformer.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.calls.append(((args, kwargs), output[0]))

    def close(self) -> None:
        self._hook.remove()


def one_step(name: str, pipeline: Any, latents: torch.Tensor) -> Any:
    """Runs the pipeline for one step from its largest sigma to 0, without classifier-free guidance."""
    family = name.removesuffix("-t5")
    length = {"max_sequence_length": 0 if name == "sd3" else 8}
    size = {"height": 32, "width": 32}
    options: dict[str, Any] = {
        "flux": {"latents": flux.pack(latents) if family == "flux" else None, "guidance_scale": 3.0},
        "sd3": {"latents": latents, "guidance_scale": 1.0},
        "wan": {"latents": latents, "guidance_scale": 1.0, "num_frames": 5},
        "pixart": {"latents": latents, "guidance_scale": 1.0, "use_resolution_binning": False, "negative_prompt": ""},
        "sana": {
            "latents": latents,
            "guidance_scale": 1.0,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
        },
    }[family]
    return pipeline(prompt=CAPTIONS, num_inference_steps=1, output_type="latent", **length, **size, **options)[0]


@pytest.mark.parametrize("name", MODELS)
def test_velocity_and_one_step_equal_the_pipelines(name: str) -> None:
    built = build(MODELS[name])
    assert built.frozen is not None
    pipeline = pipeline_of(built)
    channels = built.frozen.latents.grid.channels
    shape = (2, channels, 2, 4, 4) if name == "wan" else (2, channels, 4, 4)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    recorder = Recorder(pipeline.transformer)
    stepped = one_step(name, pipeline, latents)
    recorder.close()
    sigma = torch.full((2,), 0.999 if name == "pixart" else 1.0)
    with torch.no_grad():
        tokens = built.frozen.caption_tokens(CAPTIONS)
        velocity = built.module(latents, sigma, tokens, {}, guidance=3.0)
    expected = recorder.calls[0][1]
    if name == "flux":
        expected, stepped = flux.unpack(expected, 4, 4), flux.unpack(stepped, 4, 4)
    assert torch.equal(velocity, expected[:, :channels])
    torch.testing.assert_close(stepped, latents - sigma[0] * velocity, rtol=1e-5, atol=1e-5)


def test_flux_packing_is_undone() -> None:
    latents = torch.arange(2.0 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    assert torch.equal(flux.unpack(flux.pack(latents), 4, 6), latents)


def test_text_encoders_of_another_width_are_refused() -> None:
    recipe = DIFFUSION["sd3"].model_copy(update={"config": DIFFUSION["sd3"].config | {"joint_attention_dim": 48}})
    with pytest.raises(UserError, match="joint_attention_dim = 48, but the text encoders make it 64"):
        build(recipe)


def test_text_encoders_that_the_pipeline_does_not_have_are_refused() -> None:
    recipe = DIFFUSION["sd3"].model_copy(update={"text_encoders": {"text_encoder": t5()}})
    with pytest.raises(UserError, match=r"lacks text_encoder_2: StableDiffusion3Pipeline uses text_encoder, "):
        build(recipe)


def test_latents_of_another_number_of_channels_are_refused() -> None:
    recipe = DIFFUSION["sd3"].model_copy(
        update={"latents": DIFFUSION["sd3"].latents.model_copy(update={"pixel_unshuffle": 4})}
    )
    with pytest.raises(UserError, match=r"in_channels = 12 and out_channels = 12, but model.latents has 48"):
        build(recipe)


def test_every_family_names_a_real_pipeline_and_denoiser() -> None:
    for family in FAMILIES.values():
        assert hasattr(diffusers, family.pipeline_class)
        assert hasattr(diffusers, family.transformer_class)
