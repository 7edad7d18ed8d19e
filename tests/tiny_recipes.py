"""Tiny recipes over tiny data, for tests that train."""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from headway.recipe import Recipe, parse_recipe

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("square", "circle")


def image_folder(folder: Path, count: int = 24, side: int = 16) -> Path:
    """Coloured squares and circles with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour, shape = COLOURS[number % 4], SHAPES[number // 4 % 2]
        picture = Image.new("RGB", (side, side), "white")
        draw = ImageDraw.Draw(picture)
        box = (number % 3, 2, side - 4, side - 3)
        (draw.rectangle if shape == "square" else draw.ellipse)(box, fill=colour)
        picture.save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(f"{colour} {shape}")
    return folder


def text_file(path: Path, documents: int = 60) -> Path:
    """Documents of very unequal length."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "seven",
        "wizards",
        "quietly",
        "box",
    ]
    draw = random.Random(3)
    lines = [{"text": " ".join(draw.choices(words, k=draw.choice([1, 2, 5, 20, 60])))} for _ in range(documents)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def clip_text_encoder() -> dict[str, Any]:
    return {
        "class_name": "CLIPTextModelWithProjection",
        "tokenizer": "words",
        "max_length": 6,
        "trainable": True,
        "config": {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 6,
            "projection_dim": 16,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "pad_token_id": 0,
        },
    }


def image_recipe(folder: Path, directory: Path, **sections: dict[str, Any]) -> Recipe:
    """A Stable Diffusion 3 transformer of two blocks on the pictures of ``folder``."""
    return _recipe(
        {
            "model": {
                "class_name": "SD3Transformer2DModel",
                "config": {
                    "sample_size": 4,
                    "patch_size": 1,
                    "in_channels": 48,
                    "out_channels": 48,
                    "num_layers": 2,
                    "attention_head_dim": 16,
                    "num_attention_heads": 2,
                    "joint_attention_dim": 32,
                    "caption_projection_dim": 32,
                    "pooled_projection_dim": 32,
                    "pos_embed_max_size": 4,
                },
                "text_encoders": {"text_encoder": clip_text_encoder(), "text_encoder_2": clip_text_encoder()},
                "latents": {"pixel_unshuffle": 4},
            },
            "objective": {"kind": "flow_matching"},
            "data": {"kind": "image_folder", "path": str(folder), "resolution": 16},
        },
        directory,
        sections,
    )


def text_recipe(file: Path, directory: Path, **sections: dict[str, Any]) -> Recipe:
    """A Qwen3 of two blocks, with tied embeddings, on the bytes of ``file``."""
    return _recipe(
        {
            "model": {
                "class_name": "Qwen3ForCausalLM",
                "tokenizer": "bytes",
                "config": {
                    "vocab_size": 260,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 8,
                    "tie_word_embeddings": True,
                },
            },
            "objective": {"kind": "next_token"},
            "data": {"kind": "jsonl_text", "path": str(file), "sequence_length": 48},
        },
        directory,
        sections,
    )


def _recipe(document: dict[str, Any], directory: Path, sections: dict[str, dict[str, Any]]) -> Recipe:
    defaults: dict[str, dict[str, Any]] = {
        "run": {
            "steps": 20,
            "global_batch": 8,
            "micro_batch": 2,
            "directory": str(directory),
            "seed": 7,
            "device": "cpu",
        },
        "optim": {"lr": 3e-3, "eps": 1e-3, "schedule": "constant"},
        "precision": {"compute": "float32"},
        "ema": {"decays": [0.9]},
        "checkpoint": {"asynchronous": False},
        "metrics": {"writers": []},
    }
    for name in {**defaults, **sections}:
        document[name] = {**document.get(name, {}), **defaults.get(name, {}), **sections.get(name, {})}
    return parse_recipe(document, source="test recipe")
