"""Any recipe becomes a toy of its kind that needs no files: every example's, and models that folders describe."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headway.check import shrunk
from headway.check.ranks import run_on_ranks
from headway.check.reference import compute_reference
from headway.check.setting import recipe_of_reference
from headway.check.small_data import CORRUPT, RECORDS
from headway.data import BadRecord, open_sources, open_tokenizer
from headway.models import build_model
from headway.recipe import Recipe, load_recipe, parse_recipe, to_toml

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))


def small(example: str, folder: Path, *overrides: str) -> Recipe:
    (path,) = (path for path in EXAMPLES if path.stem == example)
    return shrunk(load_recipe(path, overrides), folder)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_trains_as_a_toy_of_its_kind(path: Path, tmp_path: Path) -> None:
    example = load_recipe(path)
    recipe = shrunk(example, tmp_path / "small")
    assert recipe.model.class_name == example.model.class_name
    assert recipe.objective == example.objective
    assert recipe.optim == example.optim
    assert [(e.class_name, e.trainable) for e in recipe.model.text_encoders.values()] == [
        (e.class_name, e.trainable) for e in example.model.text_encoders.values()
    ]
    plain = recipe_of_reference(recipe, tmp_path / "run")
    (reference,) = run_on_ranks(1, compute_reference, plain, tmp_path / "reference", timeout_s=120)
    assert all(math.isfinite(loss) for loss in reference.losses)
    assert len(set(reference.losses)) == 3
    with_gradient = [p for p in reference.parameters if p.scales.get("gradient", 0) > 0]
    assert len(with_gradient) > 0.9 * len(reference.parameters)
    assert sum(math.prod(p.shape) for p in reference.parameters) < 1_000_000
    assert (reference.frozen_parameters > 0) == bool(example.model.lora or example.model.freeze)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_toy_reads_back_from_its_toml(path: Path, tmp_path: Path) -> None:
    recipe = shrunk(load_recipe(path), tmp_path)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    again = load_recipe(tmp_path / "recipe.toml")
    assert to_toml(again) == to_toml(recipe)


@pytest.mark.parametrize(
    "kind", ["openmoji", "image_folder", "webdataset", "parquet", "video_folder", "jsonl_conversations"]
)
def test_one_record_of_a_global_batch_is_corrupt(kind: str, tmp_path: Path) -> None:
    example = {"video_folder": "wan-14b-video", "jsonl_conversations": "qwen2.5-vl-7b"}.get(kind, "sd3")
    recipe = small(example, tmp_path, f"data.kind={kind}")
    source, held = open_sources(recipe.data, cache=tmp_path, tokenizer=None, seed=0)
    assert (len(source), held) == (RECORDS, None)
    assert recipe.run.global_batch == RECORDS
    for index in range(RECORDS):
        if index == CORRUPT:
            with pytest.raises(BadRecord):
                source.read(index, 0)
        else:
            source.read(index, 0)


@pytest.mark.parametrize("kind", ["parquet", "jsonl_text"])
@pytest.mark.parametrize("packing", [True, False])
def test_documents_are_of_unequal_length(kind: str, packing: bool, tmp_path: Path) -> None:
    recipe = small("llama-3.1-8b", tmp_path, f"data.kind={kind}", f"data.packing={json.dumps(packing)}")
    source, _ = open_sources(recipe.data, cache=tmp_path, tokenizer=open_tokenizer("bytes"), seed=0)
    samples = [source.read(index, 0) for index in range(3 * RECORDS)]
    if packing:
        numbers = {len(sample.document_starts) for sample in samples if sample.document_starts is not None}
    else:
        numbers = {len(sample.tokens) for sample in samples if sample.tokens is not None}
    assert len(numbers) > 2


def config_of(class_name: str, tmp_path: Path, **config: Any) -> dict[str, Any]:
    """The toy's config of a model whose folder has this config.json."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "any", "torch_dtype": "bfloat16", **config}))
    document = {
        "model": {"class_name": class_name, "path": str(folder)},
        "objective": {"kind": "next_token"},
        "data": {"kind": "jsonl_text", "path": "none"},
        "run": {"steps": 1, "global_batch": 1, "micro_batch": 1},
    }
    recipe = shrunk(parse_recipe(document, source="test"), tmp_path / "small")
    build_model(recipe.model, recipe.precision, seed=0)
    return recipe.model.config


@pytest.mark.parametrize(("key_values", "small_key_values"), [(32, 4), (8, 2), (1, 1)])
def test_the_kind_of_attention_heads_stays(key_values: int, small_key_values: int, tmp_path: Path) -> None:
    config = config_of(
        "LlamaForCausalLM", tmp_path, num_attention_heads=32, num_key_value_heads=key_values, hidden_size=4096
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, small_key_values)


def test_ties_biases_and_scaled_rotary_positions_stay(tmp_path: Path) -> None:
    config = config_of(
        "Qwen3ForCausalLM",
        tmp_path,
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=36,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    )
    assert config["tie_word_embeddings"]
    assert config["attention_bias"]
    assert config["rope_parameters"]["rope_type"] == "linear"
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 4


@pytest.mark.parametrize("class_name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM"])
def test_other_language_models_are_shrunk_by_the_names_of_their_keys(class_name: str, tmp_path: Path) -> None:
    config = config_of(class_name, tmp_path)
    assert config["hidden_size"] == 32
    assert config.get("num_local_experts", 4) == 4


def test_a_folder_tells_what_a_denoiser_is_like(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(
        json.dumps({"_class_name": "FluxTransformer2DModel", "guidance_embeds": True, "num_layers": 19})
    )
    recipe = small("flux-full", tmp_path / "small", f"model.path={folder}")
    assert recipe.model.config["guidance_embeds"] is True
    assert recipe.model.config["num_layers"] == 2
    assert recipe.model.path is None
    assert small("flux-full", tmp_path / "other").model.config["guidance_embeds"] is False
