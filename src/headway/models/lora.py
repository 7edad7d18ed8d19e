"""Low-rank adapters by peft: injected before sharding, trained alone, merged for export."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from headway.errors import UserError
from headway.recipe import LoraRecipe


def lora_config(recipe: LoraRecipe) -> LoraConfig:
    """peft's form of the recipe, as it is written beside exported adapters."""
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=list(recipe.targets),
    )


def inject_lora(module: nn.Module, recipe: LoraRecipe) -> None:
    """Wrap the target linears in place, freeze everything else. UserError when no module is a target."""
    module.requires_grad_(False)
    try:
        inject_adapter_in_model(lora_config(recipe), module)
    except ValueError as error:
        raise UserError(f"model.lora.targets = {recipe.targets}: {error}") from None


def adapter_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Only the adapters, under peft's names for files (without the adapter's name ``default``)."""
    return {name.replace(".default.", "."): tensor for name, tensor in state.items() if ".lora_" in name}


def merge_lora(state: dict[str, torch.Tensor], recipe: LoraRecipe) -> dict[str, torch.Tensor]:
    """Full tensors by injected names -> by the bare model's names: weight + alpha / rank · B·A, computed in float32."""
    merged = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            path = name.removesuffix(".base_layer.weight")
            update = state[f"{path}.lora_B.default.weight"].float() @ state[f"{path}.lora_A.default.weight"].float()
            tensor = (tensor.float() + recipe.alpha / recipe.rank * update).to(tensor.dtype)
        merged[name.replace(".base_layer.", ".")] = tensor
    return merged
