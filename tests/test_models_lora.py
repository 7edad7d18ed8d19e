"""Adapters: only they train, they start as nothing, they merge as peft merges them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from headway.errors import UserError
from headway.models import BuiltModel, build_model, merge_lora
from headway.recipe import LoraRecipe, ModelRecipe, PrecisionRecipe
from ranks import run_ranks
from tiny_models import DIFFUSION, LANGUAGE, word_tokenizer

CPU = torch.device("cpu")
LORA = LoraRecipe(rank=4, alpha=8.0, targets=["q_proj", "o_proj"])


def build(recipe: ModelRecipe) -> BuiltModel:
    tokenizers = dict.fromkeys(recipe.text_encoders, word_tokenizer())
    return build_model(recipe, PrecisionRecipe(compute="float32"), seed=0, tokenizers=tokenizers)


def saved_base(folder: Path) -> ModelRecipe:
    built = build(LANGUAGE["qwen3"])
    built.materialize(CPU)
    model: Any = built.module
    model.save_pretrained(folder)
    return ModelRecipe(class_name="Qwen3ForCausalLM", path=folder, lora=LORA)


def test_only_adapters_train_and_they_start_as_the_base_model(tmp_path: Path) -> None:
    built = build(saved_base(tmp_path))
    built.materialize(CPU)
    trained = [n for n, p in built.module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(".lora_" in n for n in trained)
    ids = torch.arange(10)[None]
    base = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(built.module(input_ids=ids).logits, base(input_ids=ids).logits)
    a = dict(built.module.named_parameters())["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert a.detach().std() == pytest.approx(1 / 32**0.5 / 3**0.5, rel=0.3)


def test_merged_weights_equal_pefts(tmp_path: Path) -> None:
    built = build(saved_base(tmp_path))
    built.materialize(CPU)
    for name, parameter in built.module.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    merged = merge_lora(built.module.state_dict(), LORA)
    base = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert merged.keys() == base.state_dict().keys()
    reference = copy.deepcopy(built.module)
    for child in reference.modules():
        if isinstance(child, LoraLayer):
            child.merge()
    for name, tensor in reference.state_dict().items():
        if ".lora_" not in name:
            torch.testing.assert_close(merged[name.replace(".base_layer", "")], tensor)


def _sharded(recipe: ModelRecipe) -> dict[str, torch.Tensor]:
    built = build(recipe)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for _, block in built.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(built.module, mesh=mesh)
    built.materialize(CPU)
    ids = torch.arange(10)[None]
    built.module(input_ids=ids).logits.sum().backward()
    return {n: p.full_tensor() for n, p in built.module.named_parameters() if isinstance(p, DTensor)}


def test_sharded_adapters_start_with_the_same_values(tmp_path: Path) -> None:
    recipe = saved_base(tmp_path)
    built = build(recipe)
    built.materialize(CPU)
    for values in run_ranks(3, _sharded, recipe):
        for name, parameter in built.module.named_parameters():
            assert torch.equal(values[name], parameter.detach()), name


def test_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"model.lora.targets = \['nothing'\]"):
        build(LANGUAGE["qwen3"].model_copy(update={"lora": LoraRecipe(targets=["nothing"])}))


def test_a_denoiser_takes_adapters_beside_trained_text_encoders() -> None:
    built = build(DIFFUSION["flux"].model_copy(update={"lora": LoraRecipe(rank=2)}))
    built.materialize(CPU)
    trained = {n.split(".")[0] for n, p in built.module.named_parameters() if p.requires_grad and "lora" not in n}
    assert trained == {"text_encoders"}
