"""Language models of transformers: the residual and norm between attention and feed-forward in one operator.

What is between two layers stays apart: layers are what is compiled, recomputed and sharded. A norm keeps its weight and
its place: it is called with the residual too, so that what tensor parallelism does to it holds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.kernels.fusion.pattern import Pattern, code_of, hooked
from headway.kernels.rms_norm import rms_norm

RMS_NORM = frozenset({"2d9a500039bc5f77"})
"""n · w: of Llama, Mistral, Qwen and most others."""
OFFSET_RMS_NORM = frozenset({"7b2bf5f6de8da8b5"})
"""n · (1 + w): of Gemma."""


def _norm(offset: float, epsilon: str) -> Callable[..., Any]:
    """The forward of a norm: of what it is given, or of the sum with a residual, which it then returns too."""

    def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        weight = self.weight
        if residual is None:
            _, output = rms_norm(hidden_states, weight, epsilon=getattr(self, epsilon), offset=offset)
            return _as_library(output, weight)
        dtype = torch.promote_types(residual.dtype, hidden_states.dtype)
        hidden, output = rms_norm(
            residual.to(dtype),
            weight,
            branch=hidden_states.to(dtype),
            epsilon=getattr(self, epsilon),
            offset=offset,
        )
        return hidden, _as_library(output, weight)

    def _as_library(output: Tensor, weight: Tensor) -> Tensor:
        """A norm that rounds before it multiplies gives what weight and input are promoted to."""
        return output if offset else output.to(torch.promote_types(output.dtype, weight.dtype))

    return forward


def _decoder_layer(self: Any, hidden_states: Tensor, **others: Any) -> Tensor:
    attention, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
    hidden, normed = self.post_attention_layernorm(attention, hidden_states)
    return hidden + self.mlp(normed)  # type: ignore[no-any-return]


def _vision_block(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> Tensor:
    attention = self.attn(
        self.norm1(hidden_states), cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **others
    )
    hidden, normed = self.norm2(attention, hidden_states)
    return hidden + self.mlp(normed)  # type: ignore[no-any-return]


def _unless_fusible(name: str) -> Callable[[Any], str | None]:
    """An obstacle where the norm called ``name`` is none that takes a residual."""

    def obstacle(module: Any) -> str | None:
        norm = getattr(module, name)
        kind: Any = type(norm)
        if code_of(kind) not in RMS_NORM | OFFSET_RMS_NORM:
            return f"there is no fused form of its {kind.__name__}"
        return hooked(norm)

    return obstacle


ALONE = ("rms_norm",)
PATTERNS = (
    Pattern(
        ALONE, ("LlamaRMSNorm", "Qwen3RMSNorm"), RMS_NORM, _norm(0.0, "variance_epsilon"), not_within="Attention",
    ),
    Pattern(ALONE, ("GemmaRMSNorm",), OFFSET_RMS_NORM, _norm(1.0, "eps"), not_within="Attention"),
    Pattern(
        ALONE, ("LlamaDecoderLayer", "Qwen3DecoderLayer", "MixtralDecoderLayer", "Qwen3VLTextDecoderLayer"),
        frozenset({"9da2e5267e810879", "8d79f132c21c6151", "a7476a248b640443"}), _decoder_layer,
        obstacle=_unless_fusible("post_attention_layernorm"),
    ),
    Pattern(
        ALONE, ("Qwen2_5_VLVisionBlock",), frozenset({"f5c5aef21039d07d"}), _vision_block,
        obstacle=_unless_fusible("norm2"),
    ),
)  # fmt: skip
"""Digests of transformers 5.23."""
