"""Every family is built on meta, filled, called and trained."""

import pytest
import torch

from headway.models import BuiltModel, build_model, next_token_logits, vision_language_logits
from headway.recipe import ModelRecipe, PrecisionRecipe
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE, word_tokenizer

CPU = torch.device("cpu")
FLOAT32 = PrecisionRecipe(compute="float32")


def build(recipe: ModelRecipe, seed: int = 0, precision: PrecisionRecipe = FLOAT32) -> BuiltModel:
    return build_model(recipe, precision, seed=seed, tokenizers=dict.fromkeys(recipe.text_encoders, word_tokenizer()))


def perturb(module: torch.nn.Module) -> None:
    """Away from zero gates and unit norms, which hide missing gradients."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def velocity(built: BuiltModel, frames: int = 5) -> torch.Tensor:
    assert built.frozen is not None
    tokens = built.frozen.caption_tokens(["a red heart", "blue square on a green circle"])
    shape = built.frozen.latent_shape((16, 24), frames if built.family == "wan" else 1)
    noisy = torch.randn((2, *shape), generator=torch.Generator().manual_seed(1))
    features = built.frozen.encode_text(tokens)
    return built.module(noisy, torch.tensor([0.2, 0.9]), tokens, features, guidance=3.0)


@pytest.mark.parametrize("family", DIFFUSION)
def test_a_diffusion_model_is_filled_and_every_parameter_gets_a_gradient(family: str) -> None:
    built = build(DIFFUSION[family])
    assert all(p.is_meta for p in built.module.parameters())
    assert built.family == family
    built.materialize(CPU)
    perturb(built.module)
    output = velocity(built)
    assert built.frozen is not None
    assert output.shape[1:] == built.frozen.latent_shape((16, 24), 5 if family == "wan" else 1)
    output.square().sum().backward()
    without = [n for n, p in built.module.named_parameters() if p.grad is None]
    assert without == []


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_language_model_is_filled_and_every_parameter_gets_a_gradient(name: str) -> None:
    built = build(LANGUAGE[name])
    assert all(p.is_meta for p in built.module.parameters())
    built.materialize(CPU)
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = next_token_logits(built.module, ids, torch.arange(12).expand(2, 12))
    assert logits.shape == (2, 12, 128)
    logits.square().sum().backward()
    assert [n for n, p in built.module.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", VISION_LANGUAGE)
@pytest.mark.parametrize("pictures", [0, 1])
def test_a_vision_language_model_trains_all_of_it_even_without_pictures(name: str, pictures: int) -> None:
    built = build(VISION_LANGUAGE[name])
    built.materialize(CPU)
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    if pictures:
        ids[0, 3] = 122
        ids[0, 4:8] = 120
        inputs["mm_token_type_ids"][0, 4:8] = 1
        inputs["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    logits = vision_language_logits(built.module, inputs)
    assert logits.shape == (2, 12, 128)
    logits.square().sum().backward()
    missing = [n for n, p in built.module.named_parameters() if p.grad is None]
    assert missing == []
