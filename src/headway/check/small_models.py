"""Any model of a known family in few and narrow blocks: its kind of attention, norms, experts and ties stay."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from headway.check.small_data import CAPTION_TOKENS, SIDE
from headway.errors import UserError
from headway.models import FAMILIES, Family
from headway.recipe import ModelRecipe, TextEncoderRecipe

BYTES = 264
"""Vocabulary of a language model: the byte tokenizer's 257 and what is needed to divide by eight."""
WORDS = 64
FOLDED = 2
"""In place of a VAE, squares of so many pixels on a side become channels."""
CHANNELS = 3 * FOLDED**2
LATENT = SIDE // FOLDED
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
"""Of a tokenizer with one token a word."""
END_OF_DOCUMENT = dict.fromkeys(SPECIAL_TOKENS, 256)

# Keys of transformers' configs. Heads, experts and widths divide by four.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 64,
    "d_ff": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "d_kv": 8,
    "query_pre_attn_scalar": 8,
    "projection_dim": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_window_layers": 2,
}
VISION_SIZES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}
DENOISER_SIZES: dict[str, dict[str, Any]] = {
    "flux": HEADS | {"num_layers": 2, "num_single_layers": 2, "in_channels": 4 * CHANNELS, "axes_dims_rope": [4, 6, 6]},
    "sd3": HEADS
    | {
        "num_layers": 4,
        "sample_size": LATENT,
        "pos_embed_max_size": LATENT,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "caption_projection_dim": 64,
        "joint_attention_dim": 1,  # at least: the text encoders' width is put in its place
    },
    "wan": HEADS | {"num_layers": 4, "in_channels": CHANNELS, "out_channels": CHANNELS, "freq_dim": 32, "ffn_dim": 128},
    "pixart": HEADS | {"num_layers": 4, "sample_size": LATENT, "in_channels": CHANNELS, "cross_attention_dim": 64},
    "sana": HEADS
    | {
        "num_layers": 4,
        "sample_size": LATENT,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 64,
    },
}
NOT_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
}
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def small_model(model: ModelRecipe, folder: Path) -> dict[str, Any]:
    """The model section of the small recipe, with random weights; text encoders are written into ``folder``.

    Raises UserError for a class of no known family.
    """
    if model.class_name in FAMILIES:
        return _small_denoiser(model, FAMILIES[model.class_name], folder)
    return _small_language_model(model)


def has_experts(model: ModelRecipe) -> bool:
    """Whether the model has experts to share out."""
    if model.class_name in FAMILIES:
        return False
    config = _typed_config(model.class_name, _known_config(model)).to_dict()
    return any(config.get(key) for key in EXPERT_KEYS)


def _small_denoiser(model: ModelRecipe, family: Family, folder: Path) -> dict[str, Any]:
    signature = inspect.signature(getattr(diffusers, model.class_name).__init__)
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}
    config = defaults | {key: value for key, value in _known_config(model).items() if key in signature.parameters}
    encoders = {name: _small_encoder_config(name, encoder) for name, encoder in model.text_encoders.items()}
    typed = {name: _typed_config(encoder.class_name, encoders[name]) for name, encoder in model.text_encoders.items()}
    small = config | DENOISER_SIZES[family.name] | _structure(family.name, config)
    small |= dict(family.widths(small, typed))
    small = {key: value for key, value in small.items() if value is not None}
    document: dict[str, Any] = {
        "class_name": model.class_name,
        "config": small,
        "freeze": model.freeze,
        "text_encoders": {
            name: _small_encoder(name, encoder, encoders[name], folder) for name, encoder in model.text_encoders.items()
        },
        "latents": {"pixel_unshuffle": FOLDED},
    }
    if model.lora is not None:
        document["lora"] = model.lora.model_dump() | {"rank": 4}
    return document


def _structure(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """What a family's config says about its kind by means of a size."""
    if family == "sd3":
        return {"dual_attention_layers": [layer for layer in config["dual_attention_layers"] if layer < 4]}
    if family == "pixart":
        variance = config["out_channels"] == 2 * config["in_channels"]
        told = config["use_additional_conditions"]
        return {
            "out_channels": 2 * CHANNELS if variance else CHANNELS,
            "use_additional_conditions": config["sample_size"] == 128 if told is None else told,
        }
    return {}


def _small_encoder_config(name: str, encoder: TextEncoderRecipe) -> dict[str, Any]:
    known = _read_json(encoder.path, encoder.subfolder) | encoder.config
    typed = _typed_config(encoder.class_name, known)
    config = _resized(typed.to_dict(), SIZES | {"num_hidden_layers": 2, "num_layers": 2, "num_decoder_layers": 2})
    if name == "text_encoder_3":  # Stable Diffusion 3 pads two CLIPs beside each other to the width of T5
        config["d_model"] = 2 * SIZES["hidden_size"]
    facts = SPECIAL_TOKENS | {"vocab_size": WORDS, "max_position_embeddings": CAPTION_TOKENS}
    return config | {key: value for key, value in facts.items() if key in config}


def _small_encoder(name: str, encoder: TextEncoderRecipe, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Trainable ones start at random; frozen ones need a folder with weights."""
    document: dict[str, Any] = {
        "class_name": encoder.class_name,
        "tokenizer": "words",
        "max_length": CAPTION_TOKENS,
        "trainable": encoder.trainable,
    }
    if encoder.trainable:
        return document | {"config": config}
    model_class = getattr(transformers, encoder.class_name)
    with torch.random.fork_rng(devices=[]), _silence():
        torch.manual_seed(0)
        model_class(_typed_config(encoder.class_name, config)).save_pretrained(folder / name)
    return document | {"path": str(folder), "subfolder": name}


@contextmanager
def _silence() -> Iterator[None]:
    """No progress bars for files of some kilobytes."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    yield
    if shown:
        transformers.utils.logging.enable_progress_bar()


def _small_language_model(model: ModelRecipe) -> dict[str, Any]:
    known = _known_config(model)
    whole = _typed_config(model.class_name, known).to_dict()
    if "vision_config" in whole:
        config = _small_vision_language_config(whole)
    else:
        config = _resized(whole, SIZES | {"num_key_value_heads": _key_value_heads(known)})
        config |= {"vocab_size": BYTES} | END_OF_DOCUMENT
    document: dict[str, Any] = {
        "class_name": model.class_name,
        "config": config,
        "tokenizer": "bytes",
        "freeze": model.freeze,
    }
    if model.lora is not None:
        document["lora"] = model.lora.model_dump() | {"rank": 4}
    return document


def _key_value_heads(known: dict[str, Any]) -> int:
    """Of four heads: as many as the model is known to have (all, one, or some), else two."""
    heads, pairs = known.get("num_attention_heads"), known.get("num_key_value_heads")
    return {heads: 4, 1: 1}.get(pairs, 2) if pairs is not None else 2


def _small_vision_language_config(whole: dict[str, Any]) -> dict[str, Any]:
    """Ids of picture tokens are put in by who writes the tokenizer."""
    text = _resized(whole["text_config"], SIZES | {"num_key_value_heads": 2}) | END_OF_DOCUMENT
    rotary = {key: value for key, value in text["rope_parameters"].items() if key != "type"}
    text |= {"vocab_size": BYTES + 8, "rope_parameters": rotary | {"mrope_section": [1, 1, 2]}}
    rest = _resized({key: value for key, value in whole.items() if not key.endswith("_config")}, SIZES)
    for key in SPECIAL_TOKENS:
        rest.pop(key, None)
    return rest | {"text_config": text, "vision_config": _resized(whole["vision_config"], VISION_SIZES)}


def _resized(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers with ``sizes`` in the place of its own, where it has them.

    What is None is left out, as in a recipe's TOML: it is what the classes have for keys that are not given.
    """
    resized = {
        key: sizes.get(key, value) for key, value in config.items() if key not in NOT_OF_THE_MODEL and value is not None
    }
    if resized.get("layer_types"):
        resized["layer_types"] = resized["layer_types"][: resized["num_hidden_layers"]]
    if resized.get("mlp_only_layers"):
        resized["mlp_only_layers"] = [layer for layer in resized["mlp_only_layers"] if layer < 4]
    return resized


def _known_config(model: ModelRecipe) -> dict[str, Any]:
    """What the recipe and, where it is there, its folder say of the model."""
    return _read_json(model.path, model.subfolder) | model.config


def _read_json(path: Path | None, subfolder: str) -> dict[str, Any]:
    """A folder's config.json, or nothing where there is none."""
    if path is None or not (path / subfolder / "config.json").is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads((path / subfolder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path / subfolder / 'config.json'} is not readable: {error}") from None
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _typed_config(class_name: str, config: dict[str, Any]) -> Any:
    model_class: Any = getattr(transformers, class_name, None)
    if getattr(model_class, "config_class", None) is None:
        raise UserError(
            f"class_name = {class_name!r}: --shrink knows the models of transformers and, of diffusers, "
            f"{', '.join(FAMILIES)}"
        )
    return model_class.config_class(**{k: v for k, v in config.items() if k not in NOT_OF_THE_MODEL})
