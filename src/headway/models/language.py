"""Language and vision-language models of transformers: what they are fed, and what must hold in every layout."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from headway.errors import UserError


def language_family(model: Any) -> str:
    """``vision_language`` of models that take pictures, ``causal_lm`` of other models with a head over tokens.

    UserError for transformers models that predict no tokens.
    """
    if model.get_output_embeddings() is None:
        raise UserError(
            f"model.class_name = {type(model).__name__!r} predicts no tokens: use its ForCausalLM kind of class"
        )
    return "vision_language" if hasattr(model, "get_image_features") else "causal_lm"


def next_token_logits(model: Any, input_ids: Tensor, position_ids: Tensor, **further: Any) -> Tensor:
    """(B, L, V) logits of token sequences (B, L); ``further`` keywords reach the blocks.

    ``position_ids`` (B, L) int64 restart at 0 with each packed document: without an attention mask, transformers reads
    the documents' borders from them and keeps attention within each.
    """
    logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **further).logits
    return logits


def vision_language_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(B, L, V) logits of conversations with pictures.

    ``inputs`` as the processor makes them: input_ids and attention_mask (B, L), padded on the right;
    mm_token_type_ids (B, L), 1 on picture tokens; and, when the batch has pictures, pixel_values (patches, features)
    and image_grid_thw (pictures, 3).
    """
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def let_every_rank_see(model: Any) -> None:
    """Make the vision tower run on a batch without pictures too, on a blank one whose features count zero times.

    Otherwise a rank whose batch has no pictures would leave out the tower's collectives, and all ranks would hang.
    """
    model.base_model.register_forward_pre_hook(_add_blank_picture, with_kwargs=True)


def _add_blank_picture(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if kwargs.get("pixel_values") is not None:
        return None
    embeddings = inner.get_input_embeddings()(kwargs["input_ids"])
    pixels, grid = _blank_picture(inner.config.vision_config, embeddings)
    seen = inner.get_image_features(pixels, grid, return_dict=True)
    # Every tensor, also those that some models feed into deeper layers: all of the tower must get a gradient.
    features = [leaf for leaf in tree_leaves(dict(seen)) if isinstance(leaf, Tensor)]
    nothing = torch.stack([feature.sum() for feature in features]).sum() * 0
    batch, length, _ = embeddings.shape
    # Given explicitly, for the model would add the shift that the last batch with pictures has left in it.
    positions = torch.arange(length, device=embeddings.device).expand(3, batch, length)
    return args, kwargs | {
        "input_ids": None,
        "inputs_embeds": embeddings + nothing.to(embeddings.dtype),
        "position_ids": positions,
    }


def _blank_picture(config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """One merged patch of zeros: pixel_values (merge², features), image_grid_thw (1, 3)."""
    side = config.spatial_merge_size
    features = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=like.device)
    return torch.zeros(side * side, features, device=like.device, dtype=like.dtype), grid
