"""Writes trained weights as a folder that diffusers or transformers load alone, beside its place and then renamed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headway.errors import UserError
from headway.export.diffusion import write_adapters as write_pipeline_adapters
from headway.export.diffusion import write_pipeline
from headway.export.language import write_adapters as write_language_adapters
from headway.export.language import write_model
from headway.models import BuiltModel, build_model
from headway.recipe import Recipe


def export_weights(
    recipe: Recipe,
    state: Mapping[str, Tensor],
    destination: Path,
    *,
    tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
    dtype: torch.dtype | None = None,
    lora: Literal["merged", "adapters"] = "merged",
) -> str:
    """Write ``state`` to the folder ``destination``, which must not exist yet; return the line of Python that loads it.

    ``state`` holds whole CPU tensors by the trained module's names; what it lacks (frozen tensors) is read or
    initialised as it was for training. ``tokenizers``: for diffusion those made from the captions, by text encoder; for
    language models under ``tokenizer``, when the recipe names no folder. ``dtype`` of the trained model's weights
    (None: as trained; frozen text encoders and VAEs are written as they were read). ``lora``: adapters merged into the
    weights, or alone in the library's format for them. Raises UserError when the destination exists or can't be
    written, and when the state does not fit the recipe's model.
    """
    check_destination(destination)
    built = build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=tokenizers)
    _fill(built, state)
    if dtype is not None:
        built.module.to(dtype)
    partial = destination.with_name(f".{destination.name}.partial")
    adapters = lora == "adapters" and recipe.model.lora is not None
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        line = _write(recipe, built, partial, tokenizers or {}, adapters)
        os.rename(partial, destination)
    except Exception as error:
        # Libraries written in Rust pass on what the system says in exceptions of their own.
        if not isinstance(error, OSError) and "(os error" not in str(error):
            raise
        raise UserError(f"{destination} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return line.replace("folder", repr(str(destination)), 1)


def check_destination(destination: Path) -> None:
    """Raise UserError when ``destination`` exists already, or its folder is none that this user may write to."""
    if os.path.lexists(destination):
        raise UserError(f"{destination} exists already: export to another folder, or remove it")
    above = next(folder for folder in destination.absolute().parents if os.path.exists(folder))
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{destination} can't be written: {above} is no folder that this user may write to")


def _fill(built: BuiltModel, state: Mapping[str, Tensor]) -> None:
    """Give the trained module the state, and where that is silent the values it was trained with."""
    own = {*dict(built.module.named_parameters(remove_duplicate=False)), *dict(built.module.named_buffers())}
    strangers = sorted(set(state) - own)
    if strangers:
        raise UserError(
            f"the weights do not belong to the recipe's model: it has no {', '.join(strangers[:3])}"
            f"{' …' if len(strangers) > 3 else ''}"
        )
    shapes = built.module.state_dict()
    for name, tensor in state.items():
        if name in shapes and shapes[name].shape != tensor.shape:
            raise UserError(f"the weights do not fit: {name} is {tuple(tensor.shape)}, not {tuple(shapes[name].shape)}")
    places = {id(module): name for name, module in built.module.named_modules()}
    for component in built.components:
        prefix = f"{places[id(component.module)]}." if places[id(component.module)] else ""
        inside = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        component.fill(torch.device("cpu"), inside)


def _write(recipe: Recipe, built: BuiltModel, folder: Path, tokenizers: Mapping[str, Any], adapters: bool) -> str:
    if built.frozen is None and adapters:
        return write_language_adapters(recipe.model, built, folder)
    if built.frozen is None:
        return write_model(recipe.model, built, folder, tokenizers.get("tokenizer"))
    if adapters:
        return write_pipeline_adapters(recipe.model, built, folder)
    return write_pipeline(recipe, built, folder)
