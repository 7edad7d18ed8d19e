"""What an operator of torch computes and moves: shapes of products and attention, bytes, and how it is charged."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.rehearse.record import Attention, OperatorKind, Product

aten = torch.ops.aten

NO_KERNEL = frozenset(
    {
        "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "_local_scalar_dense",
        "_wrap_tensor_autograd", "_unsafe_view", "_reshape_alias", "lift_fresh", "scalar_tensor",
        "set_", "resize_", "is_same_size", "_version", "item", "is_nonzero", "record_stream",
    }
)  # fmt: skip
"""Operators that allocate, look or relabel, and launch nothing."""
KINDS: dict[OperatorKind, tuple[str, ...]] = {
    "activation": ("gelu", "gelu_backward", "silu", "silu_backward", "tanh", "sigmoid", "exp", "erf", "sin", "cos"),
    "normalisation": (
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
        "native_group_norm", "native_group_norm_backward", "var_mean", "native_batch_norm",
    ),
    "softmax": (
        "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp",
    ),
    "cast": ("_to_copy",),
    "permute": (
        "clone", "copy_", "_foreach_copy_", "cat", "stack", "index", "index_select", "index_copy", "index_put_",
        "gather",
        "embedding", "embedding_dense_backward", "scatter_add", "scatter_add_", "chunk_cat", "_chunk_cat", "roll",
        "split_with_sizes_copy", "all_gather_copy_in", "constant_pad_nd", "slice_backward", "select_backward", "flip",
        "as_strided_copy", "repeat", "sort", "argsort", "pixel_unshuffle", "pixel_shuffle",
    ),
    "optimizer": ("_fused_adamw_", "_fused_adam_", "_fused_sgd_"),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
FUSIBLE = frozenset({"_to_copy", "copy_", "mean", "sum", "amax", "cat", *KINDS["normalisation"], *KINDS["softmax"]})
"""Besides pointwise operators."""
OVERWRITING = frozenset(
    {
        "copy_", "_foreach_copy_", "fill_", "zero_", "normal_", "uniform_", "_reduce_scatter_base_", "_allgather_base_",
        "recv_", "alltoall_base_",
    }
)  # fmt: skip
"""Operators that change an argument without reading it; besides them, those with ``out``."""
READ_IN_PART = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward"})
"""Operators that read as many elements of their first argument as they return or are given places."""


@dataclass(frozen=True, slots=True)
class OperatorTraits:
    """What holds for all calls of an operator."""

    name: str
    """``aten.mm.default``."""
    short: str
    """``mm``."""
    namespace: str
    is_kernel: bool
    is_asked: bool
    """A question to the host, answered without any tensor."""
    allocates: bool
    """Whether it makes a tensor though it is no kernel."""
    kind: OperatorKind
    fusible: bool
    changed: frozenset[int | str]
    """Arguments that it writes to, by place and by name."""
    overwrites: bool
    """What it writes to is not read."""


@cache
def traits(function: Any) -> OperatorTraits:
    """The traits of an overload of torch."""
    schema = function._schema
    short, namespace = function._opname, function.namespace
    changed: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed |= {place, argument.name}
    returns = schema.returns
    is_view = not changed and bool(returns) and all(value.alias_info for value in returns)
    # Questions such as prim::device and sym_size return no tensor and change nothing.
    is_question = not changed and not any("Tensor" in str(value.type) for value in returns)
    own = namespace in ("fsdp", "c10d", "_c10d_functional")
    kind: OperatorKind = _KIND_OF.get(short, "pointwise")
    if short in _PRODUCTS:
        kind = "product"
    elif short in _ATTENTION:
        kind = "attention"
    return OperatorTraits(
        name=str(function),
        short=short,
        namespace=namespace,
        is_kernel=short not in NO_KERNEL and (own or not (is_view or is_question)) and namespace != "prim",
        is_asked=namespace == "prim" or short.startswith("sym_"),
        allocates=short.startswith(("empty", "new_empty")),
        kind=kind,
        fusible=torch.Tag.pointwise in function.tags or short in FUSIBLE,
        changed=frozenset(changed),
        overwrites=short in OVERWRITING or any(a.kwarg_only for a in schema.arguments if a.alias_info is not None),
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def bytes_of(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor's elements: what is expanded is there once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
        elif not size:
            return 0
    return count


def dtype_of(tensor: Tensor) -> str:
    """``bfloat16`` of torch.bfloat16."""
    return str(tensor.dtype)[6:]


def work_of(short: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Product | Attention | None:
    """The shapes of a product or of attention; None of other operators."""
    if short in _PRODUCTS:
        product: Product = _PRODUCTS[short](args, kwargs, result)
        return product
    if short in _ATTENTION:
        attention: Attention = _ATTENTION[short](args, kwargs)
        return attention
    return None


def _product(left: Tensor, right: Tensor) -> Product:
    """(B, m, k) x (B, k, n), or without B."""
    *batch, m, k = left.shape
    return Product(m, right.shape[-1], k, math.prod(batch), dtype_of(left))


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Product:
    """The forms of ``_grouped_mm``: rows, or the inner dimension, are shared out among the groups."""
    left, right = args[0], args[1]
    offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
    if left.ndim == 3 and right.ndim == 3:
        return _product(left, right)
    assert offsets is not None
    groups = offsets.shape[0]
    if left.ndim == 2 and right.ndim == 2:  # the gradient of weights: each group has its own part of k
        return Product(left.shape[0], right.shape[1], left.shape[1] // groups, groups, dtype_of(left))
    return Product(left.shape[-2], right.shape[-1], left.shape[-1], 1, dtype_of(left), groups)


def _convolution(inputs: Tensor, weight: Tensor, output: Tensor, groups: int, times: int = 1) -> Product:
    places = output.shape[0] * math.prod(output.shape[2:])
    return Product(places, weight.shape[0] // groups, math.prod(weight.shape[1:]), groups * times, dtype_of(inputs))


_PRODUCTS: dict[str, Any] = {
    "mm": lambda args, kwargs, result: _product(args[0], args[1]),
    "bmm": lambda args, kwargs, result: _product(args[0], args[1]),
    "_scaled_mm": lambda args, kwargs, result: _product(args[0], args[1]),
    "addmm": lambda args, kwargs, result: _product(args[1], args[2]),
    "baddbmm": lambda args, kwargs, result: _product(args[1], args[2]),
    "_grouped_mm": _grouped,
    "convolution": lambda args, kwargs, result: _convolution(args[0], args[1], result, args[8]),
    "convolution_backward": lambda args, kwargs, result: _convolution(
        args[1], args[2], args[0], args[9], sum(map(bool, args[10][:2]))
    ),
}


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Any, backward: bool) -> Attention:
    batch, heads, queries, size = query.shape
    return Attention(
        batch, heads, key.shape[1], queries, key.shape[2], size, value.shape[3], causal, mask is not None, backward,
        dtype_of(query),
    )  # fmt: skip


def _of_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
    return _attention(args[0], args[1], args[2], causal, kwargs.get("attn_mask"), backward=False)


def _of_cpu_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    return _attention(args[1], args[2], args[3], args[7], kwargs.get("attn_mask"), backward=True)


_ATTENTION: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": _of_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _of_cpu_backward,
}
"""Rehearsals run on the CPU, so its operators stand for those of every device."""
