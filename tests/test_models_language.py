"""Packed documents see only themselves, and pictures are seen alike whatever came before."""

import pytest
import torch

from headway.models import build_model, next_token_logits, vision_language_logits
from headway.recipe import ModelRecipe, PrecisionRecipe
from tiny_models import LANGUAGE, VISION_LANGUAGE

FLOAT32 = PrecisionRecipe(compute="float32")


def model_of(recipe: ModelRecipe) -> torch.nn.Module:
    built = build_model(recipe, FLOAT32, seed=1)
    built.materialize(torch.device("cpu"))
    for parameter in built.module.parameters():
        parameter.data *= 3  # far enough from uniform attention for a leak to show
    return built.module


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("training", [True, False])
def test_packed_documents_equal_separate_ones(name: str, training: bool) -> None:
    model = model_of(LANGUAGE[name]).train(training)
    generator = torch.Generator().manual_seed(0)
    lengths = [[5, 1, 6], [3, 9]]
    rows = [[torch.randint(3, 128, (n,), generator=generator) for n in row] for row in lengths]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = next_token_logits(model, ids, positions)
    for row, documents in enumerate(rows):
        alone = [next_token_logits(model, d[None], torch.arange(len(d))[None])[0] for d in documents]
        torch.testing.assert_close(packed[row], torch.cat(alone), rtol=1e-4, atol=1e-5)


def conversation(pictures: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    inputs["attention_mask"][1, 9:] = 0
    if pictures:
        ids[0, 3] = 122
        ids[0, 4:8] = 120
        inputs["mm_token_type_ids"][0, 4:8] = 1
        inputs["pixel_values"] = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    return inputs


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_the_blank_picture_changes_nothing_even_after_a_batch_with_pictures(name: str) -> None:
    model = model_of(VISION_LANGUAGE[name])
    seen = vision_language_logits(model, conversation(1))
    after_pictures = vision_language_logits(model, conversation(0))
    plain = model_of(VISION_LANGUAGE[name])
    plain.base_model._forward_pre_hooks.clear()
    torch.testing.assert_close(vision_language_logits(plain, conversation(1)), seen)
    fresh = model_of(VISION_LANGUAGE[name])
    fresh.base_model._forward_pre_hooks.clear()
    expected = vision_language_logits(fresh, conversation(0))
    kept = conversation(0)["attention_mask"].bool()
    torch.testing.assert_close(after_pictures[kept], expected[kept])
    assert not torch.allclose(seen[0], expected[0], atol=1e-3)
