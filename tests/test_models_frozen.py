"""Frozen VAEs and text encoders come from local folders and answer as the library's own."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from headway.errors import UserError
from headway.models import BuiltModel, FrozenParts, build_model
from headway.models.latents import FoldedPixels, to_uint8
from headway.recipe import LatentRecipe, ModelRecipe, PrecisionRecipe, TextEncoderRecipe
from tiny_models import DIFFUSION, clip, word_tokenizer

CPU = torch.device("cpu")
KL: dict[str, Any] = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "scaling_factor": 0.7,
    "shift_factor": 0.1,
}
WAN: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.0, 2.0, 3.0, 4.0],
}
DC: dict[str, Any] = {
    "latent_channels": 4,
    "encoder_block_out_channels": [8, 16],
    "decoder_block_out_channels": [8, 16],
    "encoder_layers_per_block": [1, 1],
    "decoder_layers_per_block": [1, 1],
    "encoder_block_types": "ResBlock",
    "decoder_block_types": "ResBlock",
    "encoder_qkv_multiscales": [[], []],
    "decoder_qkv_multiscales": [[], []],
    "scaling_factor": 0.4,
}
VAES = {"AutoencoderKL": ("sd3", KL), "AutoencoderKLWan": ("wan", WAN), "AutoencoderDC": ("sana", DC)}


def build(recipe: ModelRecipe, compute: Any = "float32") -> BuiltModel:
    tokenizers = {n: word_tokenizer() for n, e in recipe.text_encoders.items() if e.tokenizer == "words"}
    built = build_model(recipe, PrecisionRecipe(compute=compute), seed=0, tokenizers=tokenizers)
    built.materialize(CPU)
    return built


def with_vae(class_name: str, folder: Path) -> tuple[FrozenParts, Any]:
    family, config = VAES[class_name]
    vae = getattr(diffusers, class_name)(**config).eval()
    vae.save_pretrained(folder / "vae")
    base = DIFFUSION[family]
    config = base.config | {"in_channels": 4, "out_channels": 4}
    latents = LatentRecipe(vae_class=class_name, path=folder)
    built = build(base.model_copy(update={"config": config, "latents": latents}))
    assert built.frozen is not None
    return built.frozen, vae


@pytest.mark.parametrize("class_name", VAES)
def test_a_vae_encodes_and_decodes_as_its_pipeline(class_name: str, tmp_path: Path) -> None:
    frozen, vae = with_vae(class_name, tmp_path)
    video = class_name == "AutoencoderKLWan"
    pixels = torch.rand((1, 3, 5, 32, 16) if video else (1, 3, 32, 16)) * 2 - 1
    shape = frozen.latent_shape((32, 16), 5 if video else 1)
    noise = torch.randn(1, *shape)
    with torch.no_grad():
        encoded = vae.encode(pixels)
        drawn = frozen.encode(pixels, noise)
        assert drawn.shape[1:] == shape
        if class_name == "AutoencoderDC":
            expected = encoded.latent * 0.4
            raw = expected / 0.4
        elif class_name == "AutoencoderKL":
            posterior = encoded.latent_dist
            expected = (posterior.mean + posterior.std * noise - 0.1) * 0.7
            raw = expected / 0.7 + 0.1
            torch.testing.assert_close(frozen.encode(pixels), (posterior.mode() - 0.1) * 0.7)
        else:
            posterior = encoded.latent_dist
            mean, std = (torch.tensor(WAN[k]).view(1, 4, 1, 1, 1) for k in ("latents_mean", "latents_std"))
            expected = (posterior.mean + posterior.std * noise - mean) / std
            raw = expected * std + mean
        torch.testing.assert_close(drawn, expected, rtol=1e-4, atol=1e-5)
        pictures = frozen.decode(drawn)
        reference = to_uint8(vae.decode(raw).sample)
    assert pictures.shape == ((1, 5, 32, 16, 3) if video else (1, 32, 16, 3))
    assert pictures.dtype == torch.uint8
    assert (pictures.int() - reference.int()).abs().max() <= 1


def test_folded_pixels_are_exact_and_in_channels() -> None:
    folded = FoldedPixels(4)
    for shape in ((2, 3, 8, 12), (2, 3, 5, 8, 12)):
        pixels = torch.rand(shape) * 2 - 1
        latents = folded.encode(pixels)
        assert latents.shape == (2, 48, *shape[2:-2], 2, 3)
        assert torch.equal(folded.decode(latents), pixels)


def test_pixels_become_bytes_by_rounding_and_clipping() -> None:
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).view(1, 1, 1, 5).expand(1, 3, 1, 5)
    assert to_uint8(values)[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]


def test_sizes_that_do_not_divide_are_refused() -> None:
    image, video = build(DIFFUSION["sd3"]).frozen, build(DIFFUSION["wan"]).frozen
    assert image is not None
    assert video is not None
    with pytest.raises(UserError, match=r"data.resolution = 31x32 is not a multiple of 2"):
        image.latent_shape((31, 32))
    with pytest.raises(UserError, match=r"data.frames = 2"):
        image.latent_shape(32, 2)
    assert video.latent_shape(32, 5) == (12, 5, 16, 16)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_frozen_text_encoder_of_a_folder_answers_as_the_librarys(compute: str, tmp_path: Path) -> None:
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=32,
        vocab_size=14,
        max_position_embeddings=8,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    CLIPTextModelWithProjection(config).save_pretrained(tmp_path / "text_encoder")
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    frozen_one = TextEncoderRecipe(
        class_name="CLIPTextModelWithProjection", path=tmp_path, subfolder="text_encoder", max_length=8
    )
    encoders = {"text_encoder": frozen_one, "text_encoder_2": clip()}
    built = build(DIFFUSION["sd3"].model_copy(update={"text_encoders": encoders}), compute)
    assert built.frozen is not None
    assert [n for n, _ in built.module.named_children()] == ["transformer", "text_encoders"]
    assert list(built.frozen.encoders) == ["text_encoder"]
    tokens = built.frozen.caption_tokens(["a red heart", ""])
    features = built.frozen.encode_text(tokens)["text_encoder"]
    reference = CLIPTextModelWithProjection.from_pretrained(
        tmp_path / "text_encoder", dtype=getattr(torch, compute)
    ).eval()
    with torch.no_grad():
        output = reference(tokens["text_encoder"], output_hidden_states=True)
    assert torch.equal(features.sequence, output.hidden_states[-2])
    assert features.pooled is not None
    assert torch.equal(features.pooled, output.text_embeds)
    assert not features.sequence.requires_grad
    velocity = built.module(torch.randn(2, 12, 8, 8), torch.rand(2), tokens, {"text_encoder": features})
    velocity.sum().backward()
    assert all(p.grad is None for c in built.frozen.encoders.values() for p in c.module.parameters())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    encoder = clip().model_copy(update={"tokenizer": tmp_path})
    recipe = DIFFUSION["sd3"].model_copy(update={"text_encoders": {"text_encoder": encoder, "text_encoder_2": clip()}})
    with pytest.raises(UserError, match="holds no tokenizer"):
        build(recipe)


def test_an_unknown_vae_is_refused_with_the_nearest() -> None:
    latents = LatentRecipe(vae_class="AutoencoderKl", path=Path("nowhere"))
    with pytest.raises(UserError, match="did you mean 'AutoencoderKL'"):
        build(DIFFUSION["sd3"].model_copy(update={"latents": latents}))
