"""Language and vision-language models as folders of transformers, and their adapters as peft stores them."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerBase

from headway.export.bare import without_adapters
from headway.models import BuiltModel, adapter_state, load_tokenizer, lora_config
from headway.recipe import ModelRecipe

# Copied as they are: AutoProcessor cannot read a processor with videos where torchvision is not installed.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def write_model(recipe: ModelRecipe, built: BuiltModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Weights, config, generation config, and the tokenizer or processor. Returns the line of Python that loads it."""
    model: Any = without_adapters(built.module, recipe.lora)
    if recipe.path is not None and (recipe.path / recipe.subfolder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(recipe.path / recipe.subfolder)
    model.save_pretrained(folder)
    source = recipe.processor or recipe.path
    if built.family == "vision_language" and source is not None:
        for file in (source / name for name in PROCESSOR_FILES):
            if file.exists():
                shutil.copy(file, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    elif isinstance(recipe.tokenizer, Path):
        load_tokenizer(recipe.tokenizer).save_pretrained(folder)
    elif source is not None and (source / "tokenizer_config.json").exists():
        load_tokenizer(source).save_pretrained(folder)
    return f"{recipe.class_name}.from_pretrained(folder)"


def write_adapters(recipe: ModelRecipe, built: BuiltModel, folder: Path) -> str:
    """Adapters alone. Returns the line of Python that loads them."""
    assert recipe.lora is not None
    config = dataclasses.replace(lora_config(recipe.lora), base_model_name_or_path=str(recipe.path or ""))
    config.save_pretrained(str(folder))
    state = adapter_state(built.module.state_dict())
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return "PeftModel.from_pretrained(base_model, folder)"
