"""Tiny real recipes: a decoder, a mixture of experts, a denoiser of pictures and text."""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from headway.recipe import Recipe, parse_recipe

DECODER: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = DECODER | {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.1,
}
DENOISER: dict[str, Any] = {
    "sample_size": 4,
    "patch_size": 1,
    "in_channels": 48,
    "out_channels": 48,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 4,
}
CAPTION_TOKENS = 6
CLIP: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CAPTION_TOKENS,
    "projection_dim": 16,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
PICTURE_TOKENS = 16
LENGTH = 48
"""Tokens of a sample of text."""


def recipe(kind: str, folder: Path, sections: dict[str, dict[str, Any]]) -> Recipe:
    """Of kind ``decoder``, ``experts`` or ``denoiser``, its data in ``folder``; ``sections`` override."""
    document = (denoiser if kind == "denoiser" else decoder)(kind, folder)
    document |= {
        "precision": {"compute": "float32"},
        "optim": {"lr": 1e-3},
        "run": {"steps": 2, "directory": str(folder / "run"), "device": "cpu"},
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    return parse_recipe(document, source="benchmark")


def decoder(kind: str, folder: Path) -> dict[str, Any]:
    """A Qwen3 on random words, documents packed."""
    classes = {"decoder": "Qwen3ForCausalLM", "experts": "Qwen3MoeForCausalLM"}
    text = folder / "text.jsonl"
    if not text.exists():
        draw = random.Random(0)
        documents = (" ".join("".join(draw.choices("etaoinsh", k=5)) for _ in range(40)) for _ in range(40))
        text.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return {
        "model": {
            "class_name": classes[kind],
            "tokenizer": "bytes",
            "config": EXPERTS if kind == "experts" else DECODER,
        },
        "objective": {"kind": "next_token"},
        "data": {"kind": "jsonl_text", "path": str(text), "sequence_length": LENGTH},
    }


def denoiser(kind: str, folder: Path) -> dict[str, Any]:
    """A Stable Diffusion 3 transformer with two frozen text encoders, on plain colours."""
    pictures = folder / "pictures"
    if not pictures.exists():
        pictures.mkdir()
        for number, colour in enumerate(("red", "green", "blue", "gray") * 4):
            Image.new("RGB", (16, 16), colour).save(pictures / f"{number}.png")
            (pictures / f"{number}.txt").write_text(colour)
    if not (folder / "clip").exists():
        CLIPTextModelWithProjection(CLIPTextConfig(**CLIP)).save_pretrained(folder / "clip")
    encoder = {
        "class_name": "CLIPTextModelWithProjection",
        "path": str(folder / "clip"),
        "tokenizer": "words",
        "max_length": CAPTION_TOKENS,
    }
    return {
        "model": {
            "class_name": "SD3Transformer2DModel",
            "config": DENOISER,
            "text_encoders": {"text_encoder": encoder, "text_encoder_2": encoder},
            "latents": {"pixel_unshuffle": 4},
        },
        "objective": {"kind": "flow_matching"},
        "data": {"kind": "image_folder", "path": str(pictures), "resolution": 16},
    }
