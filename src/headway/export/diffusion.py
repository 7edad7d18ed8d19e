"""Diffusion models as pipeline folders of diffusers, and their adapters as it stores them."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from headway.export.bare import without_adapters
from headway.models import BuiltModel, DenoisingModel, adapter_state, image_tokens, lora_config, timestep_shift
from headway.recipe import FlowMatchingRecipe, ModelRecipe, Recipe

SHIFTING_FAMILIES = ("flux", "sd3")
"""Families whose pipelines compute the shift from the size of the picture."""


def write_pipeline(recipe: Recipe, built: BuiltModel, folder: Path) -> str:
    """The family's pipeline: denoiser, all text encoders and tokenizers, scheduler, and the VAE if there is one.

    Returns the line of Python that loads it.
    """
    assert built.frozen is not None
    model: Any = built.module
    family = built.frozen.family
    parts: dict[str, Any] = {
        "transformer": without_adapters(model.transformer, recipe.model.lora),
        "scheduler": make_scheduler(recipe, built),
        "vae": _as_stored(built.frozen.vae) if built.frozen.vae else None,
    }
    for name in (*family.required_encoders, *family.optional_encoders):
        tokenizer = name.replace("text_encoder", "tokenizer")
        frozen = built.frozen.encoders.get(name)
        parts[name] = _as_stored(frozen) if frozen else dict(model.text_encoders).get(name)
        parts[tokenizer] = built.frozen.caption_tokens.tokenizers.get(name)
        if parts[tokenizer] is not None:
            parts[tokenizer].model_max_length = built.frozen.caption_tokens.max_lengths[name]
    getattr(diffusers, family.pipeline_class)(**parts).save_pretrained(folder)
    return _loading_line(parts)


def _as_stored(frozen: Any) -> Any:
    """The module of a frozen component as its folder holds it, tensor by tensor, in whatever dtype it was computed."""
    tensors = dict(frozen.module.named_parameters()) | dict(frozen.module.named_buffers())
    for name, (_, source) in frozen.sources.items():
        if name in tensors:
            first_key = next(iter(source.keys.values()))[0]
            tensors[name].data = tensors[name].data.to(frozen.folder.read(first_key).dtype)
    frozen.fill(torch.device("cpu"))
    return frozen.module


def _loading_line(parts: dict[str, Any]) -> str:
    """The dtype must be named, or diffusers and transformers would each choose one and the parts would not fit.

    Parts that the pipeline lacks must be named as None: diffusers takes their absence for a damaged folder.
    """
    absent = "".join(f", {name}=None" for name, part in parts.items() if part is None)
    dtype = next(parts["transformer"].parameters()).dtype
    return f"DiffusionPipeline.from_pretrained(folder, dtype={dtype}{absent})"


def write_adapters(recipe: ModelRecipe, built: BuiltModel, folder: Path) -> str:
    """The denoiser's adapters alone. Returns the line of Python that loads them."""
    assert built.frozen is not None
    assert recipe.lora is not None
    model: Any = built.module
    pipeline = getattr(diffusers, built.frozen.family.pipeline_class)
    pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=adapter_state(model.transformer.state_dict()),
        transformer_lora_adapter_metadata=lora_config(recipe.lora).to_dict(),
    )
    return "pipeline.load_lora_weights(folder)"


def make_scheduler(recipe: Recipe, built: BuiltModel) -> Any:
    """The sampler of flow matching, with the recipe's shift of timesteps.

    A shift by resolution is left to the pipelines that can compute it; others get its value at the recipe's resolution.
    PixArt's pipelines need ``init_noise_sigma``, which only the multistep solver has beside flow matching.
    """
    assert isinstance(recipe.objective, FlowMatchingRecipe)
    assert isinstance(built.module, DenoisingModel)
    assert built.frozen is not None
    if recipe.objective.shift == "resolution" and built.family in SHIFTING_FAMILIES:
        return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    shape = built.frozen.latent_shape(recipe.data.resolution, recipe.data.frames)
    shift = timestep_shift(recipe.objective, image_tokens(built.module, shape))
    if built.family == "pixart":
        return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    return FlowMatchEulerDiscreteScheduler(shift=shift)
