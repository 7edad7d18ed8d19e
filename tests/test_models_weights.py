"""Each rank reads its own slices of a folder of weights, and gets what from_pretrained of the library gives."""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headway.errors import UserError
from headway.models import BuiltModel, build_model
from headway.recipe import ModelRecipe, PrecisionRecipe
from ranks import run_ranks
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE, word_tokenizer

CPU = torch.device("cpu")
FLOAT32 = PrecisionRecipe(compute="float32")
MODELS = DIFFUSION | LANGUAGE | VISION_LANGUAGE


def build(recipe: ModelRecipe, seed: int = 0) -> BuiltModel:
    return build_model(recipe, FLOAT32, seed=seed, tokenizers=dict.fromkeys(recipe.text_encoders, word_tokenizer()))


def trained(built: BuiltModel) -> torch.nn.Module:
    return built.components[0].module


def save(name: str, folder: Path, shard_size: str = "10GB") -> torch.nn.Module:
    """A perturbed model of the family, saved by its library; returns what the library loads from there."""
    built = build(MODELS[name], seed=3)
    built.materialize(CPU)
    model: Any = trained(built)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return load(name, folder)


def load(name: str, folder: Path) -> torch.nn.Module:
    library: Any = diffusers if name in DIFFUSION else transformers
    loaded = getattr(library, MODELS[name].class_name).from_pretrained(folder)
    assert isinstance(loaded, torch.nn.Module)
    return loaded


def from_folder(name: str, folder: Path) -> ModelRecipe:
    return MODELS[name].model_copy(update={"path": folder, "config": {}})


def everything(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in tensors}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [n for n in theirs if not torch.equal(ours[n], theirs[n]) or ours[n].dtype != theirs[n].dtype]
    assert different == []


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_folder_is_read_to_the_bit(name: str, tmp_path: Path) -> None:
    reference = save(name, tmp_path)
    built = build(from_folder(name, tmp_path))
    built.materialize(CPU)
    assert_equal(everything(trained(built)), everything(reference))


def _sharded(name: str, folder: str, replicas: int) -> tuple[dict[str, torch.Tensor], int, int, bool]:
    built = build(from_folder(name, Path(folder)))
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    chosen = mesh if replicas > 1 else mesh["shard"]
    for _, block in built.blocks:
        fully_shard(block, mesh=chosen)
    fully_shard(built.module, mesh=chosen)
    built.materialize(CPU)
    tied = len(everything(trained(built))) - len(
        {id(t) for _, t in [*trained(built).named_parameters(remove_duplicate=False), *trained(built).named_buffers()]}
    )
    local = sum(
        (p.to_local() if isinstance(p, DTensor) else p).nbytes
        for p in trained(built).state_dict(keep_vars=True).values()
        if isinstance(p, torch.nn.Parameter)
    )
    return everything(trained(built)), built.bytes_read(), local, tied > 0


@pytest.mark.parametrize(("name", "world", "replicas"), [
    ("llama", 2, 1),
    ("qwen3_moe", 2, 1),
    ("qwen3_moe", 4, 2),
    ("mixtral", 4, 1),
    ("qwen2_5_vl", 2, 1),
    ("sd3", 3, 1),
])  # fmt: skip
def test_each_rank_reads_its_share_of_a_sharded_folder(name: str, world: int, replicas: int, tmp_path: Path) -> None:
    reference = save(name, tmp_path, shard_size="40KB")
    assert list(tmp_path.glob("*.index.json"))
    total = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    for ours, read, _, tied in run_ranks(world, _sharded, name, str(tmp_path), replicas):
        assert_equal(ours, everything(reference))
        assert tied == (name == "llama")
        assert read < total / (world // replicas) * 1.15 + 4096


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_saved_one_by_one_are_fused_on_reading(name: str, tmp_path: Path) -> None:
    reference = save(name, tmp_path)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert any(re.search(r"experts\.0\.", key) for key in keys), "the library no longer saves experts one by one"
    for ours, read, local, _ in run_ranks(2, _sharded, name, str(tmp_path), 1):
        assert_equal(ours, everything(reference))
        assert read <= local * 1.05 + 4096


def _rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.norm.weight"), r"1 missing \(model.norm.weight\)"),
    (lambda t: t.update(extra=torch.zeros(2)), r"1 unexpected \(extra\)"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight is \(31,\) there and \(32,\)"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    _rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        build(from_folder("qwen3", tmp_path))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    _rewrite(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    with pytest.raises(UserError, match=r"model.layers.1.mlp.experts.gate_up_proj has 4 parts there and 5"):
        build(from_folder("qwen3_moe", tmp_path))


def test_a_truncated_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    save("qwen3", tmp_path, shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first = tmp_path / sorted(set(index["weight_map"].values()))[0]
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(UserError, match=f"{first.name} is missing or damaged"):
        build(from_folder("qwen3", tmp_path))
    first.unlink()
    with pytest.raises(UserError, match=f"{first.name} is missing or damaged"):
        build(from_folder("qwen3", tmp_path))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"one \*.safetensors file or one index"):
        build(from_folder("qwen3", tmp_path))


def test_the_config_of_a_folder_can_be_used_without_its_weights(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    recipe = from_folder("qwen3", tmp_path).model_copy(
        update={"load_weights": False, "config": {"intermediate_size": 48}}
    )
    built = build(recipe)
    built.materialize(CPU)
    assert trained(built).state_dict()["model.layers.0.mlp.up_proj.weight"].shape == (48, 32)
