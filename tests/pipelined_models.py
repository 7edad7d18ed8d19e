"""Small real models with enough blocks to be cut into stages, their micro-batches, and what one process computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from headway.models import DenoisingModel, build_model
from headway.models.families import family_of
from headway.models.text import TextFeatures
from headway.recipe import PrecisionRecipe
from tiny_models import DENSE, EXPERTS, VISION_LANGUAGE


@dataclass
class MicroBatch:
    """The arguments of a call, and what its output is compared with."""

    inputs: dict[str, Any]
    target: Tensor
    weight: Tensor
    """Of each sample."""


def predict(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The model's output."""
    output = model(**batch.inputs)
    return output if isinstance(output, Tensor) else output.logits


def loss_of(output: Tensor, batch: MicroBatch) -> Tensor:
    """Weighted sum over samples: of squared errors, or of cross-entropies."""
    if batch.target.dtype == torch.int64:
        error = functional.cross_entropy(output.float().transpose(1, 2), batch.target, reduction="none")
    else:
        error = (output.float() - batch.target).square()
    return (error.flatten(1).sum(1) * batch.weight).sum()


def tokens(generator: torch.Generator, length: int, size: int = 2) -> MicroBatch:
    ids = torch.randint(3, 120, (size, length + 1), generator=generator)
    positions = torch.arange(length).remainder(length - 3).expand(size, length)  # two documents
    inputs = {"input_ids": ids[:, :-1], "position_ids": positions, "use_cache": False}
    return MicroBatch(inputs, ids[:, 1:], torch.rand(size, generator=generator) * 3)


def conversation(generator: torch.Generator, number: int, size: int = 2) -> MicroBatch:
    """Padded on the right; a picture of four tokens in every even one."""
    length = 14 + number
    ids = torch.randint(3, 100, (size, length + 1), generator=generator)
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[1, 10:] = 0
    inputs = {"attention_mask": mask, "mm_token_type_ids": torch.zeros(size, length).long(), "use_cache": False}
    if number % 2 == 0:
        ids[0, 3] = 122
        ids[0, 4:8] = 120
        inputs["mm_token_type_ids"][0, 4:8] = 1
        inputs["pixel_values"] = torch.randn(16, 96, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    weight = torch.rand(size, generator=generator) * 3
    return MicroBatch(inputs | {"input_ids": ids[:, :-1]}, ids[:, 1:].masked_fill(mask == 0, -100), weight)


def latents(generator: torch.Generator, shape: tuple[int, ...], widths: dict[str, tuple[int, int]]) -> MicroBatch:
    """``widths``: of (sequence, pooled) features, by text encoder."""
    size = 2

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    condition = {
        name: TextFeatures(noise(size, 5, width), noise(size, pooled), torch.arange(5).expand(size, 5) < 4)
        for name, (width, pooled) in widths.items()
    }
    timestep = torch.rand(size, generator=generator)
    inputs = {"noisy": noise(size, *shape), "timestep": timestep, "tokens": {}, "condition": condition}
    return MicroBatch(inputs, noise(size, *shape), torch.rand(size, generator=generator) * 3)


HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
T5 = {"text_encoder": (32, 1)}


def denoiser(class_name: str, **config: Any) -> DenoisingModel:
    transformer = getattr(diffusers, class_name)(**HEADS | config)
    return DenoisingModel(family_of(class_name), transformer, {}, {})


def language_model(class_name: str, **config: Any) -> Any:
    model_class = getattr(transformers, class_name)
    model = model_class._from_config(model_class.config_class(**DENSE | {"num_hidden_layers": 4} | config))
    model.set_attn_implementation("sdpa")
    return model


def vision_language_model(name: str) -> nn.Module:
    recipe = VISION_LANGUAGE[name]
    deeper = {"text_config": recipe.config["text_config"] | {"num_hidden_layers": 4}}
    recipe = recipe.model_copy(update={"config": recipe.config | deeper})
    built = build_model(recipe, PrecisionRecipe(compute="float32"), seed=1)
    built.fill(torch.device("cpu"))
    return built.module


def flux(layers: int) -> DenoisingModel:
    return denoiser(
        "FluxTransformer2DModel",
        num_layers=layers,
        num_single_layers=layers,
        in_channels=16,
        joint_attention_dim=32,
        pooled_projection_dim=8,
        axes_dims_rope=[4, 6, 6],
        guidance_embeds=True,
    )


def sd3() -> DenoisingModel:
    return denoiser(
        "SD3Transformer2DModel",
        num_layers=4,
        in_channels=4,
        out_channels=4,
        sample_size=8,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )


def wan() -> DenoisingModel:
    return denoiser(
        "WanTransformer3DModel",
        num_layers=4,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=64,
    )


def pixart() -> DenoisingModel:
    return denoiser(
        "PixArtTransformer2DModel",
        num_layers=4,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=32,
    )


def sana() -> DenoisingModel:
    return denoiser(
        "SanaTransformer2DModel",
        num_layers=4,
        in_channels=4,
        out_channels=4,
        sample_size=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
    )


FLUX_TEXT = {"text_encoder": (1, 8), "text_encoder_2": (32, 1)}
SD3_TEXT = {"text_encoder": (16, 8), "text_encoder_2": (16, 8)}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], MicroBatch]]] = {
    "llama": (lambda: language_model("LlamaForCausalLM"), lambda g, n: tokens(g, 8 + n)),
    "llama_tied": (lambda: language_model("LlamaForCausalLM", tie_word_embeddings=True), lambda g, n: tokens(g, 8 + n)),
    "qwen3": (lambda: language_model("Qwen3ForCausalLM"), lambda g, n: tokens(g, 8 + n)),
    "qwen3_tied": (lambda: language_model("Qwen3ForCausalLM", tie_word_embeddings=True), lambda g, n: tokens(g, 8 + n)),
    "mixtral": (
        lambda: language_model("MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2),
        lambda g, n: tokens(g, 8 + n),
    ),
    "qwen3_moe": (lambda: language_model("Qwen3MoeForCausalLM", **EXPERTS), lambda g, n: tokens(g, 8 + n)),
    "qwen2_5_vl": (lambda: vision_language_model("qwen2_5_vl"), conversation),
    "qwen3_vl": (lambda: vision_language_model("qwen3_vl"), conversation),
    "flux": (lambda: flux(2), lambda g, n: latents(g, (4, 4, 4 + 2 * n), FLUX_TEXT)),
    "deep_flux": (lambda: flux(3), lambda g, n: latents(g, (4, 4, 4 + 2 * n), FLUX_TEXT)),
    "sd3": (sd3, lambda g, n: latents(g, (4, 4, 4 + 2 * n), SD3_TEXT)),
    "wan": (wan, lambda g, n: latents(g, (4, 2, 4, 4 + 2 * n), T5)),
    "pixart": (pixart, lambda g, n: latents(g, (4, 4, 4 + 2 * n), T5)),
    "sana": (sana, lambda g, n: latents(g, (4, 4, 4 + 2 * n), T5)),
}
"""Name -> (the model, its micro-batch of a size that grows with a number)."""


def perturbed(name: str) -> nn.Module:
    """Every parameter is noisy: norms at 1 and gates at 0 would hide faults."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def micro_batches(name: str, count: int, seed: int = 1, grow: int = 0) -> list[MicroBatch]:
    """``grow``: how much the second is larger than the first, and the third than the second."""
    generator = torch.Generator().manual_seed(seed)
    return [MODELS[name][1](generator, grow * (number % 3)) for number in range(count)]


def one_process(model: nn.Module, batches: list[MicroBatch], scale: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of micro-batches, and the gradients of ``scale`` · Σ loss by name."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss = loss_of(predict(model, batch), batch)
        (loss * scale).backward()
        losses.append(float(loss.detach()))
    return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
