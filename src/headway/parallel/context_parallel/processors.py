"""diffusers' attention processors, as they are, with the attention they call replaced by one over several ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.errors import UserError
from headway.parallel.context_parallel.attention import context_parallel_attention
from headway.parallel.context_parallel.ranks import ContextRanks
from headway.parallel.context_parallel.split import StreamSplit


class ContextParallelProcessor:
    """Calls a processor that projects, normalises and rotates this rank's tokens, with attention over all ranks'."""

    def __init__(self, processor: Any, ranks: ContextRanks, split: StreamSplit) -> None:
        self._processor = processor
        self._ranks = ranks
        self._split = split

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Any, ...] | None = None,
        streams: tuple[int, ...] | None = None,
    ) -> Any:
        """As the library calls it. ``streams`` are the numbers of tokens, which else follow the rotary tables."""
        if streams is None:
            assert image_rotary_emb is not None
            *image_rotary_emb, length = image_rotary_emb  # type: ignore[assignment]
            streams = (length,)
        rerouted = _Rerouted(functools.partial(self._attend, streams))
        with rerouted:
            output = self._processor(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        if rerouted.calls != 1:
            raise UserError(
                f"layout.cp: {type(self._processor).__name__} does not attend by PyTorch's own operator: unset "
                "DIFFUSERS_ATTN_BACKEND, or set it to native"
            )
        return output

    def _attend(
        self,
        streams: tuple[int, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """In the place of scaled_dot_product_attention: (B, H, S, D)."""
        if attn_mask is not None or dropout_p or is_causal:
            raise NotImplementedError("context-parallel denoisers attend without mask, order and dropout")
        steps = self._split.steps(self._joined(streams, query.shape[2]))
        return context_parallel_attention(self._ranks, query, key, value, steps, scale=scale)

    def _joined(self, streams: Sequence[int], local: int) -> Sequence[int]:
        """The first streams whose pieces make up ``local`` tokens: some layers attend within one stream only."""
        for count in range(1, len(streams) + 1):
            if sum(self._split.local(length) for length in streams[:count]) == local:
                return streams[:count]
        raise ValueError(f"{local} tokens on this rank are not its piece of streams of {streams} tokens")


class WholeTextProcessor:
    """Calls a processor whose keys and values are whole on every rank; it need not know how the queries are split."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streams: tuple[int, ...] | None = None,
    ) -> Any:
        """As the library calls it."""
        return self._processor(attn, hidden_states, encoder_hidden_states, attention_mask)


class _Rerouted(TorchFunctionMode):
    """Calls ``attend`` in the place of scaled_dot_product_attention."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **(kwargs or {}))
        if func is Tensor.unflatten:  # called as a function, it would break the graph of a compiled block
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
