"""Language and vision-language models of transformers: what they are fed, and what must hold in every layout."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.errors import UserError


def language_family(model: nn.Module) -> str:
    """``vision_language`` of models that take pictures, ``causal_lm`` of other models with a head over tokens.

    UserError for transformers models that predict no tokens.
    """
    assert isinstance(model, PreTrainedModel)
    if model.get_output_embeddings() is None:
        raise UserError(
            f"model.class_name = {type(model).__name__!r} predicts no tokens: use its ForCausalLM kind of class"
        )
    return "vision_language" if hasattr(model, "get_image_features") else "causal_lm"


def next_token_logits(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """(B, L, V) logits of token sequences (B, L).

    ``position_ids`` (B, L) int64 restart at 0 with each packed document: without an attention mask, transformers reads
    the documents' borders from them and keeps attention within each.
    """
    return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def vision_language_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """(B, L, V) logits of conversations with pictures.

    ``inputs`` as the processor makes them: input_ids and attention_mask (B, L), padded on the right;
    mm_token_type_ids (B, L), 1 on picture tokens; and, when the batch has pictures, pixel_values (patches, features)
    and image_grid_thw (pictures, 3).
    """
    return model(**inputs, use_cache=False).logits


def let_every_rank_see(model: nn.Module) -> None:
    """Make the vision tower run on a batch without pictures too, on a blank one whose features count zero times.

    Otherwise a rank whose batch has no pictures would leave out the tower's collectives, and all ranks would hang.
    """
    inner = model.base_model
    inner.register_forward_pre_hook(_add_blank_picture, with_kwargs=True)


def _add_blank_picture(
    inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if kwargs.get("pixel_values") is not None:
        return None
    embeddings = inner.get_input_embeddings()(kwargs["input_ids"])
    pixels, grid = _blank_picture(inner.config.vision_config, embeddings)
    seen = inner.get_image_features(pixels, grid, return_dict=True)
    features = [*seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
    nothing = sum(feature.sum() for feature in features) * 0
    return args, kwargs | {"inputs_embeds": embeddings + nothing.to(embeddings.dtype)}


def _blank_picture(config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """One merged patch of zeros: pixel_values (merge², features), image_grid_thw (1, 3)."""
    side = config.spatial_merge_size
    features = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=like.device)
    return torch.zeros(side * side, features, device=like.device, dtype=like.dtype), grid
