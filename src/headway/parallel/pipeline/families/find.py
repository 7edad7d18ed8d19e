"""The part of a module that can be cut into stages, with the recipe of its class."""

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from headway.errors import UserError
from headway.parallel.pipeline.families import decoder, flux, pixart, sana, sd3, vision_language, wan
from headway.parallel.pipeline.recipe import StageRecipe

DIFFUSERS = {
    "FluxTransformer2DModel": flux.RECIPE,
    "PixArtTransformer2DModel": pixart.RECIPE,
    "SD3Transformer2DModel": sd3.RECIPE,
    "SanaTransformer2DModel": sana.RECIPE,
    "WanTransformer3DModel": wan.RECIPE,
}
VISION_LANGUAGE = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")


class Pipelined(NamedTuple):
    """A library's model inside a trained module."""

    path: str
    """Of the model in the module; empty when it is the module."""
    model: Any
    recipe: StageRecipe

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """(path in the model, block), in order."""
        return [
            (f"{path}.{index}", block)
            for path in self.recipe.blocks
            for index, block in enumerate(self.model.get_submodule(path))
        ]

    def ends(self, paths: list[str]) -> list[nn.Module]:
        """The modules among ``paths``; parameters have no module of their own."""
        return [module for path in paths if isinstance(module := _get(self.model, path), nn.Module)]


def find_pipelined(module: nn.Module) -> Pipelined:
    """The model to be cut. Raises UserError when it has no recipe, or when something trains outside of it."""
    for path, child in module.named_modules():
        recipe = _recipe_of(child)
        if recipe is not None:
            pipelined = Pipelined(path, child, recipe)
            _check_all_placed(module, pipelined)
            return pipelined
    raise UserError(
        f"layout.pp: {type(_main_model(module)).__name__} can't be cut into stages; "
        f"{', '.join([*DIFFUSERS, *VISION_LANGUAGE])} can, and language models whose layers pass on nothing but hidden "
        "states (Llama, Qwen3, Mixtral, Qwen3-MoE, …). Set layout.pp = 1"
    )


def _recipe_of(module: nn.Module) -> StageRecipe | None:
    if type(module).__name__ in VISION_LANGUAGE:
        return vision_language.recipe_of(module)
    if isinstance(module, PreTrainedModel):
        return decoder.recipe_of_plan(module)
    return DIFFUSERS.get(type(module).__name__)


def _main_model(module: nn.Module) -> nn.Module:
    return next((child for child in module.modules() if type(child).__module__.split(".")[0] != "headway"), module)


def _check_all_placed(module: nn.Module, pipelined: Pipelined) -> None:
    """Every parameter belongs to the first stage's entry, to a block, or to the last stage's exit."""
    start = f"{pipelined.path}." if pipelined.path else ""
    recipe = pipelined.recipe
    placed = tuple(f"{start}{path}" for path in (*recipe.blocks, *recipe.entry, *recipe.exit))
    outside = [
        name
        for name, _ in module.named_parameters()
        if not any(name == path or name.startswith(f"{path}.") for path in placed)
    ]
    encoders = [name for name in outside if not name.startswith(start)]
    if encoders:
        raise UserError(
            f"layout.pp: {encoders[0]} trains outside of the blocks that are cut into stages: freeze the text encoders "
            "(model.text_encoders.*.trainable = false, with a path), or set layout.pp = 1"
        )
    if outside:
        raise UserError(
            f"layout.pp: {type(pipelined.model).__name__} has parameters that no stage is known to own ({outside[0]}): "
            "set layout.pp = 1"
        )


def _get(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
