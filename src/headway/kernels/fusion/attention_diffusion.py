"""Attention of diffusers' denoisers: heads normed, rotated and joined with the text's by one operator.

Their processors project, norm, join, rotate and attend; changed copies of them do what is between projection and
attention in one pass. Norms keep their weights and their places in the model: called without an input they give the
weight as it is on this rank, whatever tensor parallelism has made of it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from headway.kernels.fusion.pattern import Pattern, hooked
from headway.kernels.norm_rope import norm_rope

OWN, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _flux(
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
) -> Any:
    shape = (-1, attn.head_dim)  # tensor parallelism leaves a rank some of the heads
    query, key, value = (getattr(attn, name)(hidden_states).unflatten(-1, shape) for name in OWN)
    how: dict[str, Any] = {"pairs": "interleaved", "epsilon": attn.norm_q.eps}
    if image_rotary_emb is not None:
        cos, sin = image_rotary_emb
        how |= {"cos": cos[None, :, ::2].contiguous(), "sin": sin[None, :, ::2].contiguous()}
    if attn.added_kv_proj_dim is not None:
        text = [getattr(attn, name)(encoder_hidden_states).unflatten(-1, shape) for name in ADDED]
        query = norm_rope(text[0], attn.norm_added_q(), then=query, then_weight=attn.norm_q(), **how)
        key = norm_rope(text[1], attn.norm_added_k(), then=key, then_weight=attn.norm_k(), **how)
        value = torch.cat([text[2], value], dim=1)
    else:
        query, key = norm_rope(query, attn.norm_q(), **how), norm_rope(key, attn.norm_k(), **how)
    attended = _dispatched(self, query, key, value, attention_mask, self._parallel_config)
    if encoder_hidden_states is None:
        return attended
    tokens = encoder_hidden_states.shape[1]
    image = attn.to_out[1](attn.to_out[0](attended[:, tokens:].contiguous()))
    return image, attn.to_add_out(attended[:, :tokens].contiguous())


def _dispatched(
    processor: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parallel: Any
) -> Tensor:
    """[samples, tokens, heads·channels] by whatever attention the library is set to."""
    attended = dispatch_attention_fn(
        query, key, value, attn_mask=mask, backend=processor._attention_backend, parallel_config=parallel
    )
    return attended.flatten(2, 3).to(query.dtype)  # type: ignore[no-any-return]


def _joint(
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    shape = (attn.heads, -1)
    query, key, value = (getattr(attn, name)(hidden_states).unflatten(-1, shape) for name in OWN)
    epsilon = attn.norm_q.eps
    if encoder_hidden_states is None:
        query, key = (norm_rope(x, n(), epsilon=epsilon) for x, n in ((query, attn.norm_q), (key, attn.norm_k)))
    else:
        text = [getattr(attn, name)(encoder_hidden_states).unflatten(-1, shape) for name in ADDED]
        query = norm_rope(query, attn.norm_q(), then=text[0], then_weight=attn.norm_added_q(), epsilon=epsilon)
        key = norm_rope(key, attn.norm_k(), then=text[1], then_weight=attn.norm_added_k(), epsilon=epsilon)
        value = torch.cat([value, text[2]], dim=1)
    attended = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    attended = attended.transpose(1, 2).flatten(2).to(query.dtype)
    tokens = hidden_states.shape[1]
    image = attn.to_out[1](attn.to_out[0](attended[:, :tokens]))
    if encoder_hidden_states is None:
        return image
    context = attended[:, tokens:]
    return image, context if attn.context_pre_only else attn.to_add_out(context)


def _wan(
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    inputs = (hidden_states, context, context)
    query, key, value = (
        getattr(attn, name)(given).unflatten(-1, (attn.heads, -1)) for name, given in zip(OWN, inputs, strict=True)
    )
    how: dict[str, Any] = {"pairs": "interleaved", "epsilon": attn.norm_q.eps}
    if rotary_emb is not None:
        cos, sin = rotary_emb
        how |= {"cos": cos[:, :, 0, ::2].contiguous(), "sin": sin[:, :, 0, 1::2].contiguous()}
    query, key = norm_rope(query, attn.norm_q(), **how), norm_rope(key, attn.norm_k(), **how)
    parallel = self._parallel_config if encoder_hidden_states is None else None
    attended = _dispatched(self, query, key, value, attention_mask, parallel)
    return attn.to_out[1](attn.to_out[0](attended))  # type: ignore[no-any-return]


NORMS, ADDED_NORMS = ("norm_q", "norm_k"), ("norm_added_q", "norm_added_k")


def _obstacle(attn: Any) -> str | None:
    """Unless projections are apart, and all heads go through norms of one kind."""
    if attn.fused_projections:
        return "its projections are fused"
    if getattr(attn, "add_k_proj", None) is not None and getattr(attn, "add_q_proj", None) is None:
        return "it has keys of pictures beside those of text"
    joint = getattr(attn, "add_q_proj", None) is not None
    norms: list[Any] = [getattr(attn, name, None) for name in (*NORMS, *(ADDED_NORMS if joint else ()))]
    for norm in norms:
        if norm is None:
            return "it does not norm heads"
        plain = "RMSNorm" in type(norm).__name__ and norm.weight is not None and getattr(norm, "bias", None) is None
        if not plain or norm.eps is None or norm.eps != attn.norm_q.eps:
            return f"it norms heads by {norm}"
    return next(filter(None, map(hooked, norms)), None)


OPERATORS = ("norm_rope",)
PATTERNS = (
    Pattern(
        OPERATORS, ("FluxAttention",), frozenset({"e11f819bfc20beb1"}), _flux,
        {
            "_get_qkv_projections": frozenset({"62f347bd6a7e0c78"}),
            "_get_projections": frozenset({"ef8bceeff00dde5d"}),
            "apply_rotary_emb": frozenset({"2c36adcd4b293697"}),
        },
        _obstacle, method="__call__", part="processor", gives_weight=NORMS + ADDED_NORMS,
    ),
    Pattern(
        OPERATORS, ("Attention",), frozenset({"7141cc2a7157faff"}), _joint,
        obstacle=_obstacle, method="__call__", part="processor", gives_weight=NORMS + ADDED_NORMS,
    ),
    Pattern(
        OPERATORS, ("WanAttention",), frozenset({"8049ee022d379491"}), _wan,
        {"_get_qkv_projections": frozenset({"f595236390bc86db"})},
        _obstacle, method="__call__", part="processor", gives_weight=NORMS, across_heads=True,
    ),
)  # fmt: skip
"""Digests of diffusers 0.42."""
