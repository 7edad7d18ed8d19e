"""Attention of language models of transformers: queries and keys normed and rotated by one operator each.

Every position table of transformers comes to attention as cosines and sines of [samples, tokens, channels], whose two
halves are alike: one for each axis of pictures and videos, stretched ones, ones of packed documents.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from headway.kernels.fusion.language import RMS_NORM
from headway.kernels.fusion.pattern import Pattern, code_of, hooked
from headway.kernels.norm_rope import norm_rope

FUNCTIONS = {
    "apply_rotary_pos_emb": frozenset({"0b5ed6d10b16d0ed"}),
    "rotate_half": frozenset({"0b328a0b47ec8b4c"}),
    "eager_attention_forward": frozenset({"12638e215906fe0e"}),
}
NORMS = ("q_norm", "k_norm")


def _attention(options: Callable[[Any], dict[str, Any]], *, normed: bool) -> Callable[..., Any]:
    """A forward. ``options``: module -> what its kind tells the attention function beyond the rest."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (getattr(self, name)(hidden_states).view(shape) for name in ("q_proj", "k_proj", "v_proj"))
        pairs = self.head_dim // 2
        cos, sin = position_embeddings
        angles: dict[str, Any] = {"cos": cos[..., :pairs], "sin": sin[..., :pairs]}
        if normed:
            query = norm_rope(query, self.q_norm(), **angles, epsilon=self.q_norm.variance_epsilon)
            key = norm_rope(key, self.k_norm(), **angles, epsilon=self.k_norm.variance_epsilon)
        else:
            query, key = norm_rope(query, **angles), norm_rope(key, **angles)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **options(self),
            **kwargs,
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    return forward


def _nothing(module: Any) -> dict[str, Any]:
    return {}


def _window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _configured_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def _unless_normed(module: Any) -> str | None:
    """Heads are normed by weights of one head each."""
    for name in NORMS:
        norm = getattr(module, name)
        kind: Any = type(norm)
        if code_of(kind) not in RMS_NORM or norm.weight.shape != (module.head_dim,):
            return f"it norms heads by {norm}"
        if (reason := hooked(norm)) is not None:
            return reason
    return None


OPERATORS = ("norm_rope",)
PATTERNS = (
    Pattern(
        OPERATORS, ("LlamaAttention",), frozenset({"e0c2d1beab6dfcf4"}), _attention(_nothing, normed=False), FUNCTIONS,
    ),
    Pattern(
        OPERATORS, ("Qwen2Attention", "Qwen2_5_VLAttention"), frozenset({"7973b23c9e1080bb", "3ad7fac77d97b22c"}),
        _attention(_window, normed=False), FUNCTIONS,
    ),
    Pattern(
        OPERATORS, ("MistralAttention", "MixtralAttention"), frozenset({"afa1e0f5ddf6bba9"}),
        _attention(_configured_window, normed=False), FUNCTIONS,
    ),
    Pattern(
        OPERATORS, ("Qwen3Attention", "Qwen3MoeAttention"), frozenset({"2ca83eba1bffc612"}),
        _attention(_window, normed=True), FUNCTIONS, _unless_normed, gives_weight=NORMS,
    ),
    Pattern(
        OPERATORS, ("Qwen3VLTextAttention",), frozenset({"979437b3dad3949c"}),
        _attention(_nothing, normed=True), FUNCTIONS, _unless_normed, gives_weight=NORMS,
    ),
)  # fmt: skip
"""Digests of transformers 5.23."""
