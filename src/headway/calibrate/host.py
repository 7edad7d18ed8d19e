"""The host: what it takes to bring an operator of a training step under way, and the memory of a process that trains.

The Trainer's real step of tiny models is timed: their operators do next to nothing, so that the step is the host's.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from headway.models import build_model
from headway.parallel import Ranks
from headway.recipe import Recipe, parse_recipe
from headway.train.assembly import assemble_step
from headway.train.flops import Flops
from headway.train.throughput import peak_memory_gib
from headway.train.trainer import Trainer
from headway.train.unread_batches import rehearsed_batch, unread_tokenizers

WARM_UPS = 4
STEPS = 12
TOKENS = 16
DECODER: dict[str, Any] = {
    "model": {
        "class_name": "Qwen3ForCausalLM",
        "tokenizer": "bytes",
        "config": {
            "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False,
        },
    },
    "objective": {"kind": "next_token"},
    "data": {"kind": "jsonl_text", "path": "none", "sequence_length": TOKENS, "packing": False},
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "class_name": "CLIPTextModelWithProjection",
    "tokenizer": "words",
    "max_length": 6,
    "trainable": True,
    "config": {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 6, "projection_dim": 16, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
    },
}  # fmt: skip
DENOISER: dict[str, Any] = {
    "model": {
        "class_name": "SD3Transformer2DModel",
        "config": {
            "sample_size": 4, "patch_size": 1, "in_channels": 48, "out_channels": 48, "num_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32,
            "pooled_projection_dim": 32, "pos_embed_max_size": 4,
        },
        "text_encoders": {"text_encoder": ENCODER, "text_encoder_2": ENCODER},
        "latents": {"pixel_unshuffle": 4},
    },
    "objective": {"kind": "flow_matching"},
    "data": {"kind": "image_folder", "path": "none", "resolution": 16},
}  # fmt: skip
MODELS = {"decoder": DECODER, "denoiser": DENOISER}
"""A language model of transformers and a denoiser of diffusers, tiny; no data are read."""


@dataclass(frozen=True)
class HostTime:
    """Of one step of one of ``MODELS``."""

    model: str
    seconds: float
    process_gib: float
    """Peak resident memory of the process until then; tensors are next to nothing."""


def tiny_recipe(model: str, device: str) -> Recipe:
    """One of ``MODELS`` as a recipe, in the precision that the device trains in."""
    document = MODELS[model] | {
        "precision": {"compute": "float32" if device == "cpu" else "bfloat16"},
        "optim": {"lr": 1e-4},
        "run": {"steps": 2, "global_batch": 1, "micro_batch": 1, "directory": "none", "device": device},
    }
    return parse_recipe(document, source="calibrate")


def measure_host(device: torch.device) -> list[HostTime]:
    """Steps on this process alone, which has a process group of one rank."""
    return [_step(model, device) for model in MODELS]


def import_models() -> None:
    """Import what the models are made of, which takes seconds."""
    for model in MODELS:
        recipe = tiny_recipe(model, "cpu")
        build_model(recipe.model, recipe.precision, seed=0, tokenizers=unread_tokenizers(recipe))


def _step(model: str, device: torch.device) -> HostTime:
    recipe = tiny_recipe(model, device.type)
    tokenizers = unread_tokenizers(recipe)
    built = build_model(recipe.model, recipe.precision, seed=0, tokenizers=tokenizers)
    parts = assemble_step(recipe, Ranks(0, 1, device), built, lambda tensors: Flops(0, 0, 0), data_fingerprint="")
    batch = rehearsed_batch(recipe, built, lambda *shape, dtype: torch.ones(shape, dtype=dtype))
    trainer = Trainer(recipe, parts, lambda: False, lambda *_, **__: None)
    seconds = []
    for number in range(WARM_UPS + STEPS):
        began = perf_counter()
        trainer.step([batch])
        if number >= WARM_UPS:
            seconds.append(perf_counter() - began)
    resident = peak_memory_gib(torch.device("cpu"))
    return HostTime(model, median(seconds), resident or 0.0)


def last_level_cache_bytes() -> int:
    """Of this machine's processor; 0: not known."""
    sizes = [
        _bytes((index / "size").read_text().strip())
        for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
        if (index / "size").exists()
    ]
    return max(sizes, default=0)


def _bytes(text: str) -> int:
    """``32768K`` as the kernel writes it."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
