"""The smallest real models of every family, as recipes, and tokenizers for their text encoders."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headway.recipe import LatentRecipe, ModelRecipe, TextEncoderRecipe

WORDS = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "a",
    "red",
    "blue",
    "green",
    "heart",
    "circle",
    "square",
    "moon",
    "of",
    "on",
]


def word_tokenizer(length: int = 8) -> PreTrainedTokenizerFast:
    """Words to ids, with begin and end tokens."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=length,
        padding_side="right",
    )


def encoder(class_name: str, config: dict[str, Any], length: int = 8) -> TextEncoderRecipe:
    return TextEncoderRecipe(class_name=class_name, config=config, tokenizer="words", trainable=True, max_length=length)


def clip(width: int = 32, projected: bool = True) -> TextEncoderRecipe:
    return encoder(
        "CLIPTextModelWithProjection" if projected else "CLIPTextModel",
        {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "projection_dim": width,
        },
    )


def t5(class_name: str = "T5EncoderModel", width: int = 32) -> TextEncoderRecipe:
    return encoder(class_name, {"d_model": width, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2})


def gemma() -> TextEncoderRecipe:
    return encoder(
        "Gemma2Model",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    )


HEADS: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}

DIFFUSION = {
    "flux": ModelRecipe(
        class_name="FluxTransformer2DModel",
        config=HEADS
        | {
            "in_channels": 48,
            "num_single_layers": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 6, 6],
            "guidance_embeds": True,
        },
        text_encoders={"text_encoder": clip(projected=False), "text_encoder_2": t5()},
        latents=LatentRecipe(pixel_unshuffle=2),
    ),
    "sd3": ModelRecipe(
        class_name="SD3Transformer2DModel",
        config=HEADS
        | {
            "in_channels": 12,
            "out_channels": 12,
            "sample_size": 8,
            "joint_attention_dim": 64,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 64,
            "pos_embed_max_size": 16,
            "qk_norm": "rms_norm",
        },
        text_encoders={"text_encoder": clip(), "text_encoder_2": clip()},
        latents=LatentRecipe(pixel_unshuffle=2),
    ),
    "wan": ModelRecipe(
        class_name="WanTransformer3DModel",
        config=HEADS | {"in_channels": 12, "out_channels": 12, "text_dim": 32, "freq_dim": 16, "ffn_dim": 64},
        text_encoders={"text_encoder": t5("UMT5EncoderModel")},
        latents=LatentRecipe(pixel_unshuffle=2),
    ),
    "pixart": ModelRecipe(
        class_name="PixArtTransformer2DModel",
        config=HEADS
        | {
            "in_channels": 12,
            "out_channels": 24,
            "sample_size": 8,
            "cross_attention_dim": 32,
            "caption_channels": 32,
        },
        text_encoders={"text_encoder": t5()},
        latents=LatentRecipe(pixel_unshuffle=2),
    ),
    "sana": ModelRecipe(
        class_name="SanaTransformer2DModel",
        config=HEADS
        | {
            "in_channels": 12,
            "out_channels": 12,
            "sample_size": 8,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
        },
        text_encoders={"text_encoder": gemma()},
        latents=LatentRecipe(pixel_unshuffle=2),
    ),
}

TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 128}
DENSE: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
IMAGE_TOKENS: dict[str, Any] = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
ROTARY: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}

LANGUAGE = {
    "llama": ModelRecipe(class_name="LlamaForCausalLM", config=DENSE | {"tie_word_embeddings": True}),
    "qwen3": ModelRecipe(class_name="Qwen3ForCausalLM", config=DENSE),
    "qwen3_moe": ModelRecipe(class_name="Qwen3MoeForCausalLM", config=DENSE | EXPERTS),
    "mixtral": ModelRecipe(
        class_name="MixtralForCausalLM", config=DENSE | {"num_local_experts": 3, "num_experts_per_tok": 2}
    ),
}

VISION_LANGUAGE = {
    "qwen2_5_vl": ModelRecipe(
        class_name="Qwen2_5_VLForConditionalGeneration",
        config=IMAGE_TOKENS
        | {
            "text_config": {k: v for k, v in DENSE.items() if k != "head_dim"} | ROTARY,
            "vision_config": VISION | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3_vl": ModelRecipe(
        class_name="Qwen3VLForConditionalGeneration",
        config=IMAGE_TOKENS
        | {
            "text_config": DENSE | ROTARY,
            "vision_config": VISION
            | {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
    ),
}


def aligned(module: Any) -> Any:
    """The module, its weights moved from wherever they lie in a mapped file to memory of their own.

    The last bit of a product may depend on how its operands are aligned: outputs are compared between such modules.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone()
    return module
