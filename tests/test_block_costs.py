"""What blocks cost is counted from the program: equal to closed formulas, and stages are cut by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, T5Config

from headway.errors import UserError
from headway.models import BuiltModel, build_model
from headway.parallel import Meshes, Ranks
from headway.parallel.pipeline import BlockCosts, plan_pipeline
from headway.recipe import Recipe, TextEncoderRecipe
from headway.rehearse.fake_program import FakeValues, fake_ranks
from headway.rehearse.model_on_meta import model_on_meta
from headway.train.assembly import block_costs_of
from headway.train.layout import lay_out
from headway.train.unread_batches import unread_tokenizers
from rehearsed_recipes import flux, layers, mixture, text

L, H = 32, 32
"""Tokens of a sequence and width of the models of ``rehearsed_recipes``."""


def with_config(recipe: Recipe, **config: Any) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": recipe.model.config | config})})


def frozen_flux(folder: Path, double: int, single: int) -> Recipe:
    """FLUX.1 with text encoders in a folder, of which only the configs are there."""
    known: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    clip = CLIPTextConfig(**known, vocab_size=32, max_position_embeddings=6, bos_token_id=2, eos_token_id=3)
    clip.save_pretrained(folder / "text_encoder")
    T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2).save_pretrained(
        folder / "text_encoder_2"
    )
    recipe = flux(double, single)
    encoders = {
        name: TextEncoderRecipe(
            class_name=encoder.class_name, path=folder, subfolder=name, tokenizer="words", max_length=6
        )
        for name, encoder in recipe.model.text_encoders.items()
    }
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"text_encoders": encoders})})


def counted(recipe: Recipe) -> tuple[BuiltModel, BlockCosts]:
    built = model_on_meta(recipe)
    return built, block_costs_of(recipe, built)


def cuts(recipe: Recipe, pp: int = 2, counted: bool = True) -> tuple[int, ...]:
    """Blocks of each stage, by what they cost or by the elements of their matrices."""
    built = model_on_meta(recipe)
    layout = recipe.layout.model_copy(update={"pp": pp})
    costs = (lambda: block_costs_of(recipe, built)) if counted else None
    return plan_pipeline(layout, built.module, micro_batches=8, compiled=False, costs=costs).cuts


def test_a_block_costs_its_products_and_its_attention_and_a_look_up_costs_nothing() -> None:
    _, costs = counted(layers(3))
    weights = H * (4 + 2 + 2 + 4) * 8 + 3 * H * 64
    assert costs.entry == 0
    assert costs.blocks == (6 * L * weights + 3 * 4 * L * L * H,) * 3
    assert costs.exit == 6 * L * H * 260


def test_full_checkpointing_runs_blocks_again_but_not_the_head() -> None:
    _, plain = counted(layers(2))
    _, recomputed = counted(layers(2, memory={"activation_checkpointing": "full"}))
    assert recomputed.blocks == tuple(cost * 4 / 3 for cost in plain.blocks)
    assert recomputed.exit == plain.exit


def test_experts_cost_what_is_routed_to_them() -> None:
    """Two of four experts compute for a token, and the layer without experts is as wide as all four together."""
    recipe = with_config(mixture(), num_hidden_layers=2, mlp_only_layers=[0], intermediate_size=64)
    _, costs = counted(recipe)
    attention = 6 * L * H * (4 + 2 + 2 + 4) * 8 + 3 * 4 * L * L * H
    assert costs.blocks == (
        attention + 6 * L * 3 * H * 64,
        attention + 6 * L * (2 * 3 * H * 16 + H * 4),
    )


def test_what_is_frozen_before_the_first_adapter_has_no_backward_pass() -> None:
    lora = {"rank": 4, "targets": ["q_proj"]}
    _, costs = counted(text(model={"lora": lora}))
    first, second = costs.blocks
    # The first block's input needs no gradient, nor do its keys and values.
    projections = 2 * L * H * ((4 + 2 + 2) * 8 + 4)
    assert second - first == projections + 2 * (2 * L * L * H)
    assert costs.exit == 4 * L * H * 260


def test_attention_in_long_sequences_outweighs_a_large_head() -> None:
    """By elements the head is as dear as 14 blocks; over 4,096 tokens it is as dear as half of one."""
    recipe = with_config(layers(8, data={"sequence_length": 4096}), vocab_size=4096)
    assert cuts(recipe, counted=False) == (7, 1)
    assert cuts(recipe) == (4, 4)


def test_layers_with_many_experts_weigh_no_more_than_what_a_token_meets() -> None:
    """The last four layers have 16 experts, of which a token meets two: as wide as the others' feed-forward."""
    recipe = with_config(
        mixture(),
        num_hidden_layers=8,
        mlp_only_layers=[0, 1, 2, 3],
        intermediate_size=32,
        num_experts=16,
        vocab_size=64,
    )
    assert cuts(recipe, counted=False) == (6, 2)
    assert cuts(recipe) == (4, 4)


def test_a_double_block_of_flux_costs_what_its_tokens_make_it_and_stages_are_cut_so(tmp_path: Path) -> None:
    """It has weights for two streams, each of which sees its own tokens only."""
    recipe = frozen_flux(tmp_path, 4, 8)
    recipe = recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"pp": 2})})
    assert cuts(recipe, counted=False) == (3, 9)
    found: list[BlockCosts] = []
    with fake_ranks(0, 2):
        built = build_model(
            recipe.model,
            recipe.precision,
            seed=0,
            tokenizers=unread_tokenizers(recipe),
            placeholder=FakeValues().placeholder,
        )
        meshes, ranks = Meshes(recipe.layout, 0, 2, "cpu"), Ranks(0, 2, torch.device("cpu"))

        def costs() -> BlockCosts:
            found.append(block_costs_of(recipe, built))
            return found[0]

        layout = lay_out(recipe, built, meshes, ranks, micro_batches=4, costs=costs)
    double, single = found[0].blocks[0], found[0].blocks[-1]
    assert 0.8 < double / single < 1.3
    assert layout.staged is not None
    assert layout.staged.split.plan.cuts == (6, 6)


def test_a_model_that_can_not_be_counted_is_to_be_cut_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = layers(2)
    built = model_on_meta(recipe)

    def refuses(*arguments: Any, **keywords: Any) -> None:
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(built.module.model.layers[1].mlp, "forward", refuses)  # type: ignore[union-attr, index]
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM cost can't be counted \(no meta kernel\): .*layout.pp_cuts"):
        block_costs_of(recipe, built)
