"""Wrong names and keys end in one clear line that tells the right ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import UserError
from headway.models import build_model
from headway.models.classes import find_class, read_config
from headway.recipe import ModelRecipe, PrecisionRecipe
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE, word_tokenizer


def build(recipe: ModelRecipe, master: Any = "float32") -> Any:
    tokenizers = dict.fromkeys(recipe.text_encoders, word_tokenizer())
    return build_model(recipe, PrecisionRecipe(master=master), seed=0, tokenizers=tokenizers)


def test_a_misspelt_class_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'FluxTransformer2DModel'"):
        find_class("FluxTransformer2dModel")


@pytest.mark.parametrize("name", ["FluxPipeline", "AutoTokenizer", "AutoModelForCausalLM", "Path", "torch"])
def test_what_is_no_model_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no model of diffusers or transformers"):
        find_class(name)


@pytest.mark.parametrize(("recipe", "key", "near"), [
    (DIFFUSION["sd3"], "num_layer", "num_layers"),
    (LANGUAGE["qwen3"], "num_hidden_layer", "num_hidden_layers"),
])  # fmt: skip
def test_a_misspelt_config_key_is_refused_with_the_nearest(recipe: ModelRecipe, key: str, near: str) -> None:
    with pytest.raises(UserError, match=f"'{key}' is unknown to .*: did you mean '{near}'"):
        build(recipe.model_copy(update={"config": recipe.config | {key: 2}}))


def test_a_misspelt_key_of_a_nested_config_is_refused() -> None:
    recipe = VISION_LANGUAGE["qwen3_vl"]
    config = recipe.config | {"vision_config": {"dept": 2}}
    with pytest.raises(UserError, match="'dept' is unknown to Qwen3VLVisionConfig: did you mean 'depth'"):
        build(recipe.model_copy(update={"config": config}))


def test_a_config_that_makes_no_model_is_refused() -> None:
    with pytest.raises(UserError, match="Qwen3ForCausalLM refuses its config"):
        build(LANGUAGE["qwen3"].model_copy(update={"config": {"hidden_size": "wide"}}))


def test_a_folder_without_a_config_or_of_another_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json does not exist"):
        read_config(tmp_path, "", {}, find_class("SD3Transformer2DModel"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not readable"):
        read_config(tmp_path, "", {}, find_class("SD3Transformer2DModel"))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(UserError, match="is of a FluxTransformer2DModel"):
        read_config(tmp_path, "", {}, find_class("SD3Transformer2DModel"))


def test_the_recipes_keys_override_the_folders_also_inside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 8, "vocab_size": 9}}))
    config = read_config(
        tmp_path, "", {"text_config": {"hidden_size": 16}}, find_class("Qwen3VLForConditionalGeneration")
    )
    assert config == {"text_config": {"hidden_size": 16, "vocab_size": 9}}


def test_dropout_inside_a_model_is_refused() -> None:
    recipe = LANGUAGE["qwen3"]
    with pytest.raises(UserError, match=r"attention_dropout drops out 0.1"):
        build(recipe.model_copy(update={"config": recipe.config | {"attention_dropout": 0.1}}))


def test_a_model_that_predicts_no_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="predicts no tokens"):
        build(LANGUAGE["qwen3"].model_copy(update={"class_name": "Qwen3Model"}))


def test_frozen_modules_are_named_and_must_exist() -> None:
    recipe = VISION_LANGUAGE["qwen2_5_vl"]
    built = build(recipe.model_copy(update={"freeze": ["model.visual"]}))
    frozen = {n.split(".")[1] for n, p in built.module.named_parameters() if not p.requires_grad}
    assert frozen == {"visual"}
    with pytest.raises(UserError, match=r"'model.visua' is no module.*did you mean 'model.visual'"):
        build(recipe.model_copy(update={"freeze": ["model.visua"]}))
    with pytest.raises(UserError, match="leaves nothing to train"):
        build(recipe.model_copy(update={"freeze": ["model", "lm_head"]}))


def test_parameters_have_the_master_dtype_and_buffers_the_librarys() -> None:
    built = build(LANGUAGE["qwen3"], master="bfloat16")
    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in built.module.buffers()} == {torch.float32}
    built.materialize(torch.device("cpu"))
    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("recipe", "expected"), [
    (DIFFUSION["flux"], ["transformer.transformer_blocks.0", "transformer.transformer_blocks.1",
                         "transformer.single_transformer_blocks.0", "transformer.single_transformer_blocks.1",
                         "text_encoders.text_encoder.encoder.layers.0"]),
    (VISION_LANGUAGE["qwen3_vl"], ["model.visual.blocks.0", "model.visual.blocks.1",
                                   "model.language_model.layers.0", "model.language_model.layers.1"]),
    (DIFFUSION["pixart"], ["transformer.transformer_blocks.0", "transformer.transformer_blocks.1",
                           "text_encoders.text_encoder.encoder.block.0", "text_encoders.text_encoder.encoder.block.1"]),
])  # fmt: skip
def test_repeated_blocks_of_all_kinds_are_found_in_order(recipe: ModelRecipe, expected: list[str]) -> None:
    names = [name for name, _ in build(recipe).blocks]
    assert names[: len(expected)] == expected
