"""Blocks of diffusers' denoisers with their adaLN chains fused: residual, norm and modulation in one operator.

What is between two blocks stays apart: a block's last gated residual and the next block's first norm. Blocks are what
is compiled, recomputed and sharded, so nothing reaches across them. Each forward here has the arguments and results of
the library's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels.adaln import adaln
from headway.kernels.fusion.pattern import Pattern, hooked, plain_norm


def _modulated(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """norm(x)·(1 + scale) + shift with parameters [samples, rows, width]."""
    return adaln(x, scale, shift, epsilon=norm.eps)[1]


def _zero_norm(
    self: Any,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(6, dim=1)
    return _modulated(self.norm, x, scale[:, None], shift[:, None]), gate, mlp_shift, mlp_scale, mlp_gate


def _zero_norm_single(self: Any, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return _modulated(self.norm, x, scale[:, None], shift[:, None]), gate


def _continuous_norm(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
    return _modulated(self.norm, x, scale[:, None], shift[:, None])


def _gated(hidden: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """The residual at the end of a block."""
    return torch.addcmul(hidden, gate, branch)


def _clipped(hidden: Tensor) -> Tensor:
    """As Flux keeps float16 finite."""
    return hidden.clip(-65504, 65504) if hidden.dtype == torch.float16 else hidden


def _feed_forward_stream(
    norm: Any, feed_forward: Any, hidden: Tensor, attention: Tensor, gates: tuple[Tensor, ...]
) -> Tensor:
    """After attention: both residuals of a stream. ``gates``: of attention, then shift, scale and gate; [B, width]."""
    gate, shift, scale, mlp_gate = (each[:, None] for each in gates)
    hidden, normed = adaln(hidden, scale, shift, branch=attention, gate=gate, epsilon=norm.eps)
    return _gated(hidden, mlp_gate, feed_forward(normed))


def _flux_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    image, *image_gates = self.norm1(hidden_states, emb=temb)
    text, *text_gates = self.norm1_context(encoder_hidden_states, emb=temb)
    attention, text_attention = self.attn(
        hidden_states=image,
        encoder_hidden_states=text,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    hidden = _feed_forward_stream(self.norm2, self.ff, hidden_states, attention, tuple(image_gates))
    encoder = _feed_forward_stream(
        self.norm2_context, self.ff_context, encoder_hidden_states, text_attention, tuple(text_gates)
    )
    return _clipped(encoder), hidden


def _joint_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    joint_attention_kwargs = joint_attention_kwargs or {}
    image, gate, *image_gates = self.norm1(hidden_states, emb=temb)
    if self.context_pre_only:
        text = self.norm1_context(encoder_hidden_states, temb)
    else:
        text, *text_gates = self.norm1_context(encoder_hidden_states, emb=temb)
    attention, text_attention = self.attn(hidden_states=image, encoder_hidden_states=text, **joint_attention_kwargs)
    if self.use_dual_attention:
        *image_gates, own_image, own_gate = image_gates
        hidden_states = _gated(hidden_states, gate[:, None], attention)
        attention, gate = self.attn2(hidden_states=own_image, **joint_attention_kwargs), own_gate
    hidden = _feed_forward_stream(self.norm2, self.ff, hidden_states, attention, (gate, *image_gates))
    if self.context_pre_only:
        return None, hidden
    encoder = _feed_forward_stream(
        self.norm2_context, self.ff_context, encoder_hidden_states, text_attention, tuple(text_gates)
    )
    return encoder, hidden


def _wan_block(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any
) -> Tensor:
    if temb.ndim == 4:  # a timestep for each token: (samples, tokens, 6, width)
        parts = (self.scale_shift_table.unsqueeze(0) + temb.float()).unbind(2)
    else:
        parts = (self.scale_shift_table + temb.float()).chunk(6, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    attention = self.attn1(_modulated(self.norm1, hidden_states, scale, shift), None, None, rotary_emb)
    if isinstance(self.norm2, nn.Identity):
        hidden = normed = (hidden_states.float() + attention * gate).type_as(hidden_states)
    else:
        # A norm's own weight and bias are a scale of weight - 1 and a shift that all samples share.
        own = [each.float().expand(len(hidden_states), 1, -1) for each in (self.norm2.weight - 1, self.norm2.bias)]
        hidden, normed = adaln(hidden_states, *own, branch=attention, gate=gate, epsilon=self.norm2.eps)
    attention = self.attn2(normed, encoder_hidden_states, None, None)
    hidden, normed = adaln(hidden, mlp_scale, mlp_shift, branch=attention, epsilon=self.norm3.eps)
    return (hidden.float() + self.ffn(normed).float() * mlp_gate).type_as(hidden)


def _single_scale_block(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Tensor | None = None,
    added_cond_kwargs: dict[str, Tensor] | None = None,
) -> Tensor:
    others = cross_attention_kwargs or {}
    parts = (self.scale_shift_table[None] + timestep.reshape(len(hidden_states), 6, -1)).chunk(6, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    branch = self.attn1(
        _modulated(self.norm1, hidden_states, scale, shift),
        encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
        attention_mask=attention_mask,
        **others,
    )
    if self.attn2 is not None:
        hidden_states = _gated(hidden_states, gate, branch)
        gate = None
        branch = self.attn2(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            **others,
        )
    hidden, normed = adaln(hidden_states, mlp_scale, mlp_shift, branch=branch, gate=gate, epsilon=self.norm2.eps)
    return _gated(hidden, mlp_gate, self.ff(normed))


def _sana_block(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Any = None,
    height: Any = None,
    width: Any = None,
) -> Tensor:
    parts = (self.scale_shift_table[None] + timestep.reshape(len(hidden_states), 6, -1)).chunk(6, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    branch = self.attn1(_modulated(self.norm1, hidden_states, scale, shift))
    if self.attn2 is not None:
        hidden_states = _gated(hidden_states, gate, branch)
        gate = None
        branch = self.attn2(
            hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask
        )
    hidden, normed = adaln(hidden_states, mlp_scale, mlp_shift, branch=branch, gate=gate, epsilon=self.norm2.eps)
    image = self.ff(normed.unflatten(1, (height, width)).permute(0, 3, 1, 2))
    return _gated(hidden, mlp_gate, image.flatten(2, 3).permute(0, 2, 1))


def _norm_inside(module: Any) -> str | None:
    return plain_norm(module.norm)


def _plain_norms(*names: str) -> Any:
    """An obstacle unless all of these children are norms without parameters; those that are None do not count."""

    def obstacle(module: Any) -> str | None:
        norms = [getattr(module, name) for name in names]
        return next(filter(None, (plain_norm(norm) for norm in norms if norm is not None)), None)

    return obstacle


def _flux_obstacle(block: Any) -> str | None:
    if "IPAdapter" in type(block.attn.processor).__name__:
        return "its attention has an IP-Adapter"
    return _plain_norms("norm2", "norm2_context")(block)  # type: ignore[no-any-return]


def _joint_obstacle(block: Any) -> str | None:
    if block._chunk_size is not None:
        return "its feed-forward goes in chunks"
    return _plain_norms("norm2", "norm2_context")(block)  # type: ignore[no-any-return]


def _wan_obstacle(block: Any) -> str | None:
    if not isinstance(block.norm2, nn.Identity) and (block.norm2.weight is None or hooked(block.norm2)):
        return f"its second norm is {block.norm2}"
    return _plain_norms("norm1", "norm3")(block)  # type: ignore[no-any-return]


def _single_scale_obstacle(block: Any) -> str | None:
    if block.norm_type != "ada_norm_single":
        return f"its norms are of type {block.norm_type}"
    if block._chunk_size is not None or block.pos_embed is not None or hasattr(block, "fuser"):
        return "it has parts that are not known here"
    return _plain_norms("norm1", "norm2")(block)  # type: ignore[no-any-return]


ADALN = ("adaln",)
PATTERNS = (
    Pattern(
        ADALN, ("AdaLayerNormZero",), frozenset({"050f448b827a694b"}), _zero_norm,
        obstacle=_norm_inside, covers=("norm",),
    ),
    Pattern(
        ADALN, ("AdaLayerNormZeroSingle",), frozenset({"2e760535a01c1249"}), _zero_norm_single,
        obstacle=_norm_inside, covers=("norm",),
    ),
    Pattern(
        ADALN, ("AdaLayerNormContinuous",), frozenset({"b7c31ce89e70c615"}), _continuous_norm,
        obstacle=_norm_inside, covers=("norm",),
    ),
    Pattern(
        ADALN, ("FluxTransformerBlock",), frozenset({"b2745c76a4be5773"}), _flux_block,
        obstacle=_flux_obstacle, covers=("norm2", "norm2_context"),
    ),
    Pattern(
        ADALN, ("JointTransformerBlock",), frozenset({"56a0d7dca0de7d20"}), _joint_block,
        obstacle=_joint_obstacle, covers=("norm2", "norm2_context"),
    ),
    Pattern(
        ADALN, ("WanTransformerBlock",), frozenset({"360a7b38249d612e"}), _wan_block,
        obstacle=_wan_obstacle, covers=("norm1", "norm2", "norm3"),
    ),
    Pattern(
        ADALN, ("BasicTransformerBlock",), frozenset({"fbcd8e430fad2dad"}), _single_scale_block,
        obstacle=_single_scale_obstacle, covers=("norm1", "norm2"),
    ),
    Pattern(
        ADALN, ("SanaTransformerBlock",), frozenset({"320ef4e930057bf6"}), _sana_block,
        obstacle=_plain_norms("norm1", "norm2"), covers=("norm1", "norm2"),
    ),
)  # fmt: skip
"""Digests of diffusers 0.42."""
