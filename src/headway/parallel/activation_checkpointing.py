"""What a block keeps for its backward pass: everything, nothing (full), or the expensive operators (selective)."""

import functools
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Matrix products, attention and communication cost far more to repeat than to keep. Gathered sequences are not kept:
# they are as many times larger than what a rank holds between blocks as there are ranks.
_aten = torch.ops.aten
KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
        _aten._scaled_mm_v2.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    mode: Literal["none", "full", "selective"],
    kept: Collection[Any] = KEPT_OPERATORS,
) -> None:
    """Make each block recompute what it does not keep: with ``selective``, the results of the operators ``kept``.

    The forward is replaced on the instance: names stay.
    """
    if mode == "none":
        return
    for block in blocks:
        block.forward = _checkpointed(block.forward, frozenset(kept) if mode == "selective" else frozenset())


def _checkpointed(forward: Any, kept: frozenset[Any]) -> Any:
    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    context: dict[str, Any] = {}
    if kept:
        context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    @functools.wraps(forward)
    def recomputing_forward(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **context, **keywords)

    return recomputing_forward
