"""Weights folders as the libraries write them: real tokenizers and processors, hardly any weights, in bfloat16."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer, T5Tokenizer

from tiny_models import DENSE, EXPERTS, ROTARY, VISION

CORPUS = "the quick brown fox jumps over a lazy dog while seven wizards quietly box a red green blue square circle"
QWEN_SPECIALS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# As Qwen2.5-VL's: a turn ends with <|im_end|> and a line break.
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLIP: dict[str, Any] = {
    "vocab_size": 514,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 16,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}
T5: dict[str, Any] = {"vocab_size": 140, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
KL: dict[str, Any] = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
}
WAN_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [0.1, -0.2, 0.3, -0.4],
    "latents_std": [1.0, 2.0, 1.5, 0.5],
}
TRANSFORMER: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}


def clip_tokenizer() -> PreTrainedTokenizerBase:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: id for id, token in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer() -> PreTrainedTokenizerBase:
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz", "▁"})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -4.0) for letter in letters)]
    return T5Tokenizer(vocab=pieces, extra_ids=100, model_max_length=512)


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]], Tokenizer]:
    """(vocabulary, merges, tokenizer) of byte-level BPE learnt from ``CORPUS``: 256 bytes and some pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer.get_vocab(), [tuple(pair) for pair in merges], tokenizer


def qwen_tokenizer() -> PreTrainedTokenizerBase:
    vocabulary, merges, _ = byte_pairs()
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        extra_special_tokens=QWEN_SPECIALS,
        chat_template=QWEN_TEMPLATE,
    )


def llama_tokenizer() -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs()[2], bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )


def flux_folder(folder: Path) -> Path:
    transformer = TRANSFORMER | {
        "in_channels": 16,
        "num_single_layers": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "axes_dims_rope": [4, 6, 6],
        "guidance_embeds": True,
    }
    torch.manual_seed(0)
    pipeline = diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(**transformer),
        text_encoder=_clip("CLIPTextModel"),
        tokenizer=clip_tokenizer(),
        text_encoder_2=_t5("T5EncoderModel"),
        tokenizer_2=t5_tokenizer(),
        vae=diffusers.AutoencoderKL(**KL),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )
    return _saved(pipeline, folder)


def sd3_folder(folder: Path) -> Path:
    transformer = TRANSFORMER | {
        "in_channels": 4,
        "out_channels": 4,
        "sample_size": 8,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 8,
    }
    torch.manual_seed(0)
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(**transformer),
        text_encoder=_clip("CLIPTextModelWithProjection"),
        tokenizer=clip_tokenizer(),
        text_encoder_2=_clip("CLIPTextModelWithProjection"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=_t5("T5EncoderModel"),
        tokenizer_3=t5_tokenizer(),
        vae=diffusers.AutoencoderKL(**KL),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return _saved(pipeline, folder)


def wan_folder(folder: Path) -> Path:
    transformer = TRANSFORMER | {
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 16,
        "ffn_dim": 64,
        "qk_norm": "rms_norm_across_heads",
    }
    torch.manual_seed(0)
    pipeline = diffusers.WanPipeline(
        transformer=diffusers.WanTransformer3DModel(**transformer),
        text_encoder=_t5("UMT5EncoderModel"),
        tokenizer=t5_tokenizer(),
        vae=diffusers.AutoencoderKLWan(**WAN_VAE),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return _saved(pipeline, folder)


def language_folder(folder: Path, class_name: str) -> Path:
    tokenizer = llama_tokenizer() if class_name == "LlamaForCausalLM" else qwen_tokenizer()
    config = DENSE | (EXPERTS if class_name == "Qwen3MoeForCausalLM" else {})
    return _with_tokenizer(folder, class_name, config | _ids(tokenizer), tokenizer)


def qwen_vl_folder(folder: Path) -> Path:
    """Qwen2.5-VL whose pictures are patches of 4 x 4 pixels, four of them a token."""
    tokenizer = qwen_tokenizer()
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start"}
    config = {
        "text_config": {k: v for k, v in DENSE.items() if k != "head_dim"} | ROTARY | _ids(tokenizer),
        "vision_config": VISION | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    } | {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    _with_tokenizer(folder, "Qwen2_5_VLForConditionalGeneration", config, tokenizer)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 64,
        "max_pixels": 1024,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _clip(class_name: str) -> Any:
    return getattr(transformers, class_name)(transformers.CLIPTextConfig(**CLIP))


def _t5(class_name: str) -> Any:
    model = getattr(transformers, class_name)
    return model(model.config_class(**T5))


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"vocab_size": 320, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}


def _saved(pipeline: Any, folder: Path) -> Path:
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _with_tokenizer(folder: Path, class_name: str, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, class_name)
    model(model.config_class(**config)).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
