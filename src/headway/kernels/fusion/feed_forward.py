"""Gated feed-forwards of both libraries, and of mixtures of experts: activation and product in one operator."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headway.kernels.fusion.pattern import Pattern
from headway.kernels.glu import Activation, glu, glu_packed

ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
"""Classes of torch and transformers."""


def _activation(module: Any) -> Activation:
    return ACTIVATIONS[type(module).__name__]


def _apart(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), _activation(self.act_fn)))  # type: ignore[no-any-return]


def _apart_of_pictures(self: Any, hidden_state: Tensor) -> Tensor:
    return _apart(self, hidden_state)


def _packed(self: Any, hidden_states: Tensor) -> Tensor:
    packed = self.gate_up_proj(hidden_states)
    return self.down_proj(glu_packed(packed, _activation(self.activation_fn)))  # type: ignore[no-any-return]


def _experts_gate(self: Any, gate_up_out: Tensor) -> Tensor:
    return glu_packed(gate_up_out, _activation(self.act_fn))


def _geglu(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return glu_packed(self.proj(hidden_states), "gelu", gate_first=False)


def _swiglu(self: Any, hidden_states: Tensor) -> Tensor:
    return glu_packed(self.proj(hidden_states), _activation(self.activation), gate_first=False)


def _unless_known(name: str) -> Callable[[Any], str | None]:
    """An obstacle where the activation called ``name`` is none of the operator's."""

    def obstacle(module: Any) -> str | None:
        activation = getattr(module, name)
        return None if type(activation).__name__ in ACTIVATIONS else f"its activation is {activation}"

    return obstacle


GLU = ("glu",)
PATTERNS = (
    Pattern(
        GLU, ("LlamaMLP", "Qwen3MLP", "GemmaMLP"), frozenset({"a1ac67e4f1cdfadc"}), _apart,
        obstacle=_unless_known("act_fn"),
    ),
    Pattern(
        GLU, ("Qwen2_5_VLMLP",), frozenset({"ecb1991616784eb3"}), _apart_of_pictures,
        obstacle=_unless_known("act_fn"),
    ),
    Pattern(
        GLU, ("Phi3MLP",), frozenset({"5210603ac7604665"}), _packed, obstacle=_unless_known("activation_fn"),
    ),
    Pattern(
        GLU, ("Qwen3MoeExperts", "MixtralExperts"), frozenset({"0e034baf64777ab9"}), _experts_gate,
        method="_apply_gate", obstacle=_unless_known("act_fn"),
    ),
    Pattern(GLU, ("GEGLU",), frozenset({"9bc5ea222ed8f15a"}), _geglu),
    Pattern(GLU, ("SwiGLU",), frozenset({"44a7e3e6d1cc66f1"}), _swiglu, obstacle=_unless_known("activation")),
)  # fmt: skip
"""Digests of transformers 5.23 and diffusers 0.42."""
