"""What was trained loads with the library alone and answers the same to the bit."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headway.errors import UserError
from headway.export import check_destination, export_weights
from headway.models import BuiltModel, build_model
from headway.recipe import (
    DataRecipe,
    FlowMatchingRecipe,
    LatentRecipe,
    LoraRecipe,
    ModelRecipe,
    NextTokenRecipe,
    PrecisionRecipe,
    Recipe,
    RunRecipe,
    TextEncoderRecipe,
)
from ranks import run_ranks
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE, aligned, word_tokenizer
from tiny_weights import sd3_folder

CPU = torch.device("cpu")
CAPTIONS = ["a red heart", "blue square on moon"]


def recipe_of(model: ModelRecipe, shift: Any = 3.0) -> Recipe:
    run = RunRecipe(steps=1, global_batch=1, micro_batch=1, seed=5)
    precision = PrecisionRecipe(compute="float32")
    if model.class_name in {m.class_name for m in DIFFUSION.values()}:
        objective: Any = FlowMatchingRecipe(kind="flow_matching", shift=shift)
        return Recipe(model=model, objective=objective, data=DataRecipe(kind="openmoji"), run=run, precision=precision)
    data = DataRecipe(kind="jsonl_text", path=Path("text.jsonl"))
    return Recipe(model=model, objective=NextTokenRecipe(kind="next_token"), data=data, run=run, precision=precision)


def tokenizers_of(model: ModelRecipe) -> dict[str, Any]:
    return {name: word_tokenizer() for name in model.text_encoders}


def trained(recipe: Recipe) -> BuiltModel:
    built = build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=tokenizers_of(recipe.model))
    built.materialize(CPU)
    generator = torch.Generator().manual_seed(7)
    for parameter in built.module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    aligned(built.module)
    return built


def ours(built: BuiltModel, latents: torch.Tensor, sigma: float) -> torch.Tensor:
    assert built.frozen is not None
    tokens = built.frozen.caption_tokens(CAPTIONS)
    with torch.no_grad():
        return built.module(latents, torch.full((2,), sigma), tokens, {}, guidance=3.0)


def load_pipeline(recipe: Recipe, state: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """Export, and run the line of Python that export says loads it."""
    line = export_weights(recipe, state, folder, tokenizers=tokenizers_of(recipe.model), **options)
    assert line.startswith(f"DiffusionPipeline.from_pretrained({str(folder)!r}")
    pipeline = eval(line, {"DiffusionPipeline": DiffusionPipeline, "torch": torch})
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            aligned(part)
    return pipeline


def encoded_by(pipeline: Any) -> list[tuple[Any, Any]]:
    """(arguments, output) of the pipeline's denoiser, as they come."""
    calls: list[tuple[Any, Any]] = []
    pipeline.transformer.register_forward_hook(lambda m, a, k, o: calls.append((k, o[0])), with_kwargs=True)
    return calls


@pytest.mark.parametrize("family", DIFFUSION)
def test_a_pipeline_folder_gives_the_same_velocity(family: str, tmp_path: Path) -> None:
    recipe = recipe_of(DIFFUSION[family])
    built = trained(recipe)
    pipeline = load_pipeline(recipe, built.module.state_dict(), tmp_path / "out")
    assert pipeline.vae is None
    module: Any = built.module
    for mine, theirs in [
        (module.transformer, pipeline.transformer),
        *((encoder, getattr(pipeline, name)) for name, encoder in module.text_encoders.items()),
    ]:
        expected = dict(mine.named_parameters()) | dict(mine.named_buffers())
        loaded = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
        assert expected.keys() == loaded.keys()
        assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in expected.items())
    assert pipeline.scheduler.config["flow_shift" if family == "pixart" else "shift"] == 3.0


def test_the_demos_pipeline_is_called_with_a_prompt(tmp_path: Path) -> None:
    recipe = recipe_of(DIFFUSION["sd3"], shift=1.0)
    built = trained(recipe)
    pipeline = load_pipeline(recipe, built.module.state_dict(), tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    calls = encoded_by(pipeline)
    latents = torch.randn(2, 12, 4, 4, generator=torch.Generator().manual_seed(0))
    result = pipeline(
        prompt=CAPTIONS, latents=latents, height=32, width=32, num_inference_steps=2, guidance_scale=1.0,
        max_sequence_length=0, output_type="latent",
    ).images  # fmt: skip
    first, second = calls
    assert torch.equal(ours(built, latents, 1.0), first[1])
    assert torch.equal(ours(built, second[0]["hidden_states"], float(second[0]["timestep"][0]) / 1000), second[1])
    assert result.shape == (2, 12, 4, 4)
    guided = pipeline(
        prompt="a red heart", height=32, width=32, num_inference_steps=2, guidance_scale=2.5, max_sequence_length=0,
        output_type="latent",
    ).images  # fmt: skip
    assert torch.isfinite(guided).all()


def test_resolution_shift_becomes_dynamic_shifting(tmp_path: Path) -> None:
    recipe = recipe_of(DIFFUSION["flux"], shift="resolution")
    assert load_pipeline(recipe, {}, tmp_path / "out").scheduler.config.use_dynamic_shifting is True


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_transformers_folder_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(LANGUAGE[name])
    built = trained(recipe)
    export_weights(recipe, built.module.state_dict(), tmp_path / "out", tokenizers={"tokenizer": word_tokenizer()})
    loaded = aligned(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, built.module(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a red heart").input_ids == [1, 4, 5, 8, 2]
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_a_vision_language_folder_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(VISION_LANGUAGE[name])
    built = trained(recipe)
    export_weights(recipe, built.module.state_dict(), tmp_path / "out")
    loaded = aligned(AutoModelForImageTextToText.from_pretrained(tmp_path / "out"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, built.module(input_ids=ids).logits)


def test_a_vision_language_folder_keeps_its_processor(tmp_path: Path) -> None:
    source = tmp_path / "source"
    word_tokenizer().save_pretrained(source)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024).save_pretrained(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    recipe = recipe_of(VISION_LANGUAGE["qwen2_5_vl"].model_copy(update={"processor": source}))
    export_weights(recipe, {}, tmp_path / "out")
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").patch_size == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a red heart").input_ids == [1, 4, 5, 8, 2]
    assert tokenizer.chat_template == "{{ messages }}"


def test_weights_are_written_in_the_dtype_asked_for(tmp_path: Path) -> None:
    recipe = recipe_of(LANGUAGE["qwen3"])
    built = trained(recipe)
    export_weights(recipe, built.module.state_dict(), tmp_path / "out", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    expected = {n: t.bfloat16() for n, t in built.module.state_dict().items()}
    assert all(torch.equal(t, expected[n]) for n, t in loaded.state_dict().items())


@pytest.mark.parametrize(("stored", "compute"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_frozen_parts_leave_as_they_came_whatever_they_were_computed_in(
    stored: str, compute: Any, tmp_path: Path
) -> None:
    """A VAE and text encoders in float32 must not come back rounded, nor bfloat16 ones twice their size."""
    source = sd3_folder(tmp_path / "source")
    pipeline = DiffusionPipeline.from_pretrained(source, dtype=getattr(torch, stored))
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
        for parameter in part.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
    pipeline.save_pretrained(source)
    encoders = {
        name: TextEncoderRecipe(class_name=type(getattr(pipeline, name)).__name__, path=source, subfolder=name)
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3")
    }
    model = ModelRecipe(
        class_name="SD3Transformer2DModel",
        path=source,
        subfolder="transformer",
        text_encoders=encoders,
        latents=LatentRecipe(vae_class="AutoencoderKL", path=source),
    )
    recipe = recipe_of(model).model_copy(update={"precision": PrecisionRecipe(compute=compute)})
    export_weights(recipe, {}, tmp_path / "out")
    for part in ("vae", *encoders):
        files = sorted(file.name for file in (source / part).glob("*.safetensors"))
        assert files
        for file in files:
            left, came = load_file(tmp_path / "out" / part / file), load_file(source / part / file)
            assert left.keys() == came.keys()
            assert all(t.dtype == getattr(torch, stored) and torch.equal(left[n], t) for n, t in came.items())


def lora_run(folder: Path) -> tuple[Recipe, BuiltModel, dict[str, torch.Tensor]]:
    base = recipe_of(LANGUAGE["qwen3"])
    export_weights(base, {}, folder)
    lora = LoraRecipe(rank=2, alpha=4.0, targets=["q_proj", "v_proj"])
    recipe = recipe_of(ModelRecipe(class_name="Qwen3ForCausalLM", path=folder, lora=lora))
    built = trained(recipe)
    return recipe, built, {n: p.detach() for n, p in built.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["merged", "adapters"])
def test_adapters_of_a_language_model_are_exported(kind: Any, tmp_path: Path) -> None:
    recipe, built, adapters = lora_run(tmp_path / "base")
    export_weights(recipe, adapters, tmp_path / "out", lora=kind)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / ("out" if kind == "merged" else "base"))
    if kind == "adapters":
        loaded = PeftModel.from_pretrained(loaded, str(tmp_path / "out"))
    ids = torch.arange(12)[None]
    aligned(loaded)
    with torch.no_grad():
        theirs, mine = loaded(input_ids=ids).logits, built.module(input_ids=ids).logits
    if kind == "adapters":
        assert torch.equal(theirs, mine)
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)


def test_adapters_of_a_denoiser_are_loaded_by_its_pipeline(tmp_path: Path) -> None:
    base = recipe_of(DIFFUSION["flux"])
    tokenizers = tokenizers_of(base.model)
    pipeline = load_pipeline(base, {}, tmp_path / "base")
    lora = LoraRecipe(rank=2, alpha=4.0, targets=["to_q", "to_k"])
    from_base = {"lora": lora, "path": tmp_path / "base", "subfolder": "transformer", "config": {}}
    recipe = recipe_of(base.model.model_copy(update=from_base))
    built = trained(recipe)
    adapters = {n: p.detach() for n, p in built.module.named_parameters() if ".lora_" in n}
    export_weights(recipe, adapters, tmp_path / "adapters", tokenizers=tokenizers, lora="adapters")
    merged = load_pipeline(recipe, adapters, tmp_path / "merged")
    pipeline.load_lora_weights(tmp_path / "adapters")
    loaded = {n: p for n, p in pipeline.transformer.named_parameters() if ".lora_" in n}
    assert len(loaded) == len(adapters) > 0
    for (mine, a), (theirs, b) in zip(sorted(adapters.items()), sorted(loaded.items()), strict=True):
        assert mine.replace("transformer.", "", 1).replace(".default.", ".default_0.") == theirs
        assert torch.equal(a, b)
    layers = [m for m in pipeline.transformer.modules() if hasattr(m, "scaling")]
    assert {layer.scaling["default_0"] for layer in layers} == {2.0}
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for name, tensor in merged.transformer.state_dict().items():
        torch.testing.assert_close(tensor, pipeline.transformer.state_dict()[name])


def test_an_existing_destination_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("out", "link"):
        with pytest.raises(UserError, match="exists already"):
            export_weights(recipe_of(LANGUAGE["qwen3"]), {}, tmp_path / name)


def test_a_destination_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/a/b can't be written: .*/file is no folder that this user may write to"):
        check_destination(tmp_path / "file" / "a" / "b")


def _exported_to_a_small_file(folder: Path) -> list[str]:
    """What is left in ``folder`` when a file of the export does not fit on its disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(UserError, match=r"out can't be written: .*File too large"):
        export_weights(recipe_of(LANGUAGE["qwen3"]), {}, folder / "out")
    return [path.name for path in folder.iterdir()]


def test_an_export_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run_ranks(1, _exported_to_a_small_file, tmp_path) == [[]]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(LANGUAGE["qwen3"])
    with pytest.raises(UserError, match="it has no wrong"):
        export_weights(recipe, {"wrong": torch.zeros(1)}, tmp_path / "out")
    with pytest.raises(UserError, match=r"model.norm.weight is \(2,\), not \(32,\)"):
        export_weights(recipe, {"model.norm.weight": torch.zeros(2)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
