"""Tiny recipes whose data and weights are never read, for rehearsals and recorded runs."""

from pathlib import Path
from typing import Any

from headway.recipe import Recipe
from tiny_recipes import image_recipe, text_recipe

NOWHERE = Path("nowhere")
HIGH = {"clip_norm": 1e-6}
"""Gradients are always clipped, as in a rehearsal."""


def text(**sections: dict[str, Any]) -> Recipe:
    """Qwen3 of two blocks; two sequences of 32 bytes a rank."""
    run = {"global_batch": 4, "micro_batch": 1} | sections.pop("run", {})
    data = {"sequence_length": 32, "packing": False} | sections.pop("data", {})
    optim = HIGH | sections.pop("optim", {})
    return text_recipe(NOWHERE, NOWHERE, optim=optim, run=run, data=data, **sections)


def layers(number: int, **sections: dict[str, Any]) -> Recipe:
    """``text`` with ``number`` blocks."""
    model = text().model
    recipe = text(**sections)
    config = model.config | {"num_hidden_layers": number}
    return recipe.model_copy(update={"model": model.model_copy(update={"config": config})})


def mixture(**sections: dict[str, Any]) -> Recipe:
    """Qwen3-MoE of two blocks with four experts."""
    recipe = text(**sections)
    config = {
        "vocab_size": 260,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = recipe.model.model_copy(update={"class_name": "Qwen3MoeForCausalLM", "config": config})
    return recipe.model_copy(update={"model": model})


def images(**sections: dict[str, Any]) -> Recipe:
    """Stable Diffusion 3 of two blocks with two trained text encoders."""
    run = {"global_batch": 4, "micro_batch": 1} | sections.pop("run", {})
    return image_recipe(NOWHERE, NOWHERE, optim=HIGH, run=run, **sections)


def flux(double: int, single: int, **sections: dict[str, Any]) -> Recipe:
    """FLUX.1 with ``double`` and ``single`` blocks, which are of two kinds."""
    recipe = images(**sections)
    encoder = recipe.model.text_encoders["text_encoder"].model_copy(update={"class_name": "CLIPTextModel"})
    t5 = encoder.model_copy(
        update={
            "class_name": "T5EncoderModel",
            "config": {
                "vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
                "pad_token_id": 0, "eos_token_id": 3,
            },
        }
    )  # fmt: skip
    config = {
        "num_layers": double, "num_single_layers": single, "attention_head_dim": 16, "num_attention_heads": 2,
        "in_channels": 192, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": [4, 6, 6],
        "guidance_embeds": True,
    }  # fmt: skip
    model = recipe.model.model_copy(
        update={
            "class_name": "FluxTransformer2DModel",
            "config": config,
            "text_encoders": {"text_encoder": encoder, "text_encoder_2": t5},
        }
    )
    return recipe.model_copy(update={"model": model})
