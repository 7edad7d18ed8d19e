"""What context parallelism cannot do, said before anything is built."""

import math
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from headway.errors import UserError
from headway.parallel.context_parallel.diffusion import DENOISERS

REFUSED_DENOISERS = {
    "SanaTransformer2DModel": "its linear attention and convolutions mix neighbouring tokens outside of attention",
}


def check_context_parallel(model: nn.Module, *, ring: int, ulysses: int, tp: int = 1) -> None:
    """Raises UserError unless ``model`` can share its sequences over ``ring`` x ``ulysses`` ranks.

    ``model`` is a denoiser of diffusers or a language model of transformers, whose heads ``tp`` ranks share besides.
    """
    if ring * ulysses == 1:
        return
    if isinstance(model, ModelMixin):
        _check_denoiser(model)
        heads = model.config.num_attention_heads
    else:
        _check_language_model(model)
        heads = model.config.get_text_config().num_attention_heads  # type: ignore[union-attr, operator]
    _check_heads(heads, ring, ulysses, tp)


def _check_denoiser(model: Any) -> None:
    name = type(model).__name__
    if name not in DENOISERS:
        reason = REFUSED_DENOISERS.get(name, "where its tokens can be split is not known here")
        raise UserError(f"layout.cp is not for {name}: {reason}; set layout.cp = 1, or use {', '.join(DENOISERS)}")


def _check_language_model(model: Any) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    if hasattr(model, "get_image_features"):
        raise UserError(
            f"layout.cp is not for {name}: pictures take the place of tokens, and positions are counted, within the "
            "whole sequence; set layout.cp = 1"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None
    if kinds != {"full_attention"} or windowed:
        raise UserError(
            f"layout.cp is for layers that attend to the whole sequence; {name} has {', '.join(sorted(kinds))}"
            f"{' of a window' if windowed else ''}: set layout.cp = 1"
        )
    if getattr(config, "v_head_dim", None) is not None or not model._can_set_attn_implementation():
        raise UserError(
            f"layout.cp is not for {name}, whose attention is of its own kind: set layout.cp = 1, or use a model whose "
            "keys and values are of one width"
        )


def _check_heads(heads: int, ring: int, ulysses: int, tp: int) -> None:
    """All-to-all gives every rank whole heads of those that tensor parallelism leaves it."""
    local = heads // tp
    if local % ulysses == 0:
        return
    cp, fitting = ring * ulysses, math.gcd(local, ring * ulysses)
    mixed = f' or "both" with layout.cp_ulysses = {fitting}' if fitting > 1 else ""
    raise UserError(
        f"layout.cp: an all-to-all of {ulysses} ranks does not divide the model's {local} heads"
        f"{f' of {heads} that layout.tp = {tp} leaves each rank' if tp > 1 else ''}; layout.cp_kind can be "
        f'"ring"{mixed} with layout.cp = {cp}, or the all-to-all one of '
        f"{', '.join(str(n) for n in range(1, local + 1) if local % n == 0)} ranks"
    )
