"""Floating-point operations of a micro-batch, counted from the program that trains.

Convention (PaLM, arXiv 2204.02311, appendix B, as Megatron-LM, nanoGPT and torch count too): matrix products,
convolutions and attention only, a multiply-add counting as two. Attention counts the whole score matrix, also under a
causal or a document mask (MaxText halves it since July 2025). Its backward pass is twice its forward pass: the scores
that a fused kernel computes again are not counted. What activation checkpointing computes again is kept apart, for HFU.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

aten = torch.ops.aten
T = TypeVar("T")

SHAPES_COUNTED = 64
"""Counting takes about a second a set of shapes: pictures that all differ in size must not slow the training down."""


@dataclass(frozen=True)
class Flops:
    """Operations of one forward and backward pass."""

    forward: int
    backward: int
    recomputed: int
    """Forward operations that activation checkpointing ran again during the backward pass."""

    @property
    def model(self) -> int:
        """What the mathematics needs: counts for MFU."""
        return self.forward + self.backward

    @property
    def executed(self) -> int:
        """What was run, recomputation included: counts for HFU."""
        return self.forward + self.backward + self.recomputed


def count_flops(forward_and_loss: Callable[[], Tensor], model: nn.Module) -> Flops:
    """Run ``forward_and_loss`` and the backward pass of the scalar that it returns, and count.

    Works on any device. With ``model`` on meta nothing is computed and any size takes about a second: give it a batch
    made by ``on_meta``. Gradients that ``model`` had are put back.
    """
    return add(count_flops_of_parts(forward_and_loss, model, []))


def count_flops_of_parts(
    forward_and_loss: Callable[[], Tensor], model: nn.Module, blocks: Sequence[nn.Module]
) -> list[Flops]:
    """As ``count_flops``: of what comes before the first of ``blocks``, of each of them, and of what comes after them.

    The forward pass must call ``blocks`` once each, in their order. What runs between two belongs to the former.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    parts = _Parts(blocks)
    try:
        with _WrittenIntegers(), _Counter(parts) as counter:
            loss = forward_and_loss()
            counter.phase = "backward"
            if loss.requires_grad:
                loss.backward()
    finally:
        parts.close()
        for parameter, gradient in kept:
            parameter.grad = gradient
    return [
        Flops(*(counter.counts[part, phase] for phase in ("forward", "backward", "recomputed")))
        for part in range(len(blocks) + 2)
    ]


def run_on_meta(function: Callable[[], T]) -> T:
    """The result of ``function`` on tensors made by ``on_meta``, where models run as they do when they are counted."""
    with _WrittenIntegers(), _Counter(_Parts([])):
        return function()


def utilisation(
    flops: Flops, step_time_s: float, peak_tflops: float | None
) -> tuple[float, float | None, float | None]:
    """TFLOP/s of model operations, MFU and HFU of one device that ran ``flops`` in ``step_time_s``.

    MFU and HFU are fractions of ``peak_tflops``, the dense peak of the precision used; None without a known peak.
    """
    tflops = flops.model / step_time_s / 1e12
    if peak_tflops is None:
        return tflops, None, None
    return tflops, tflops / peak_tflops, flops.executed / step_time_s / 1e12 / peak_tflops


def add(parts: list[Flops]) -> Flops:
    """The operations of several micro-batches together."""
    return Flops(
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        sum(part.recomputed for part in parts),
    )


class MicroBatchFlops:
    """Counts micro-batches on a meta copy of the model, once for each of the first ``SHAPES_COUNTED`` sets of shapes.

    ``loss`` is the objective on that copy, of the micro-batch's tensors. Pictures of varying size are told apart by the
    values of ``*_grid_thw``: attention stays within each.
    """

    def __init__(self, model: nn.Module, loss: Callable[[dict[str, Tensor]], Tensor]) -> None:
        self._model = model
        self._loss = loss
        self._known: dict[Any, Flops] = {}

    def __call__(self, tensors: Mapping[str, Tensor]) -> Flops | None:
        """The operations of one forward and backward pass of a micro-batch; None when too many shapes were counted."""
        shapes = tuple(
            (name, tuple(tensor.shape), tuple(tensor.flatten().tolist()) if name.endswith("_grid_thw") else ())
            for name, tensor in tensors.items()
        )
        if shapes not in self._known:
            if len(self._known) == SHAPES_COUNTED:
                return None
            self._known[shapes] = count_flops(lambda: self._loss(on_meta(tensors)), self._model)
        return self._known[shapes]


def on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A micro-batch to count with: floats on meta; integers stay, for models that read sizes out of their values."""
    return {
        name: tensor if tensor.is_meta else tensor.to("meta" if tensor.is_floating_point() else "cpu")
        for name, tensor in tensors.items()
    }


class _Parts:
    """To which part of a model an operator belongs: before (0), in (1, 2, …) and after (their number + 1) its blocks.

    In the forward pass hooks of the blocks tell. In the backward pass it is the part that made the autograd node at
    work: nodes are numbered as they are made.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.now = 0
        self._first_nodes = [0]
        """Of each part so far, in order."""
        self._hooks = [
            block.register_forward_pre_hook(lambda module, args, part=part: self._begin(part))
            for part, block in enumerate(blocks, start=1)
        ]
        if blocks:
            self._hooks.append(blocks[-1].register_forward_hook(lambda module, args, out: self._begin(len(blocks) + 1)))

    def of_backward(self) -> int:
        """The part whose gradients are being computed."""
        node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        return bisect.bisect_right(self._first_nodes, node._sequence_nr()) - 1

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, part: int) -> None:
        self.now = part
        self._first_nodes.append(torch.autograd._get_sequence_nr())


class _Counter(TorchDispatchMode):
    """Adds up the operations of every operator, by part and phase, and lets floats on meta meet integers on the CPU.

    An operator whose operands are partly on meta runs on meta. Integers that are made for, or moved to, meta stay on
    the CPU, where they have values.
    """

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.phase = "forward"
        self.counts: Counter[tuple[int, str]] = Counter()
        self._parts = parts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args, kwargs = _on_one_device(func, args, kwargs)
        result = _run(func, args, kwargs)
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            # A backward pass runs with gradients off; a checkpointed region runs its forward pass again with them on.
            again = self.phase == "backward" and torch.is_grad_enabled()
            part = self._parts.now if self.phase == "forward" else self._parts.of_backward()
            self.counts[part, "recomputed" if again else self.phase] += formula(*args, **kwargs, out_val=result)
        return result


class _WrittenIntegers(TorchFunctionMode):
    """Lets ``torch.tensor([1, 2], device=meta)`` keep its values: no operator that the counter sees makes it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
            written = func(*args, **kwargs | {"device": "cpu"})
            return written.to("meta") if written.is_floating_point() else written
        return func(*args, **kwargs)


def _on_one_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's operands with real integers put on meta where the result has to be there, and kept otherwise."""
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    real = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if len(real) < len(tensors):
        if real and any(tensor.device.type == "meta" for tensor in tensors):
            if func.overloadpacket is aten.index:
                args = (args[0], [part for index in args[1] for part in _positions(index)])
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return args, kwargs
    wants_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
    dtype = kwargs.get("dtype") or (real[0].dtype if real else _default_dtype(func, args))
    if wants_meta and not (dtype.is_floating_point or dtype.is_complex):
        kwargs = kwargs | {"device": torch.device("cpu")}
    return args, kwargs


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = args[0].dtype if func.overloadpacket is aten._grouped_mm else None
    if dtype == torch.float32 and args[0].device.type == "meta":
        # On meta alone, torch refuses grouped products that are not bfloat16.
        args, kwargs = tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs))
        return func(*args, **kwargs).to(dtype)
    return func(*args, **kwargs)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """A real mask as the positions that it picks, one tensor a dimension: their number is the size of the result."""
    if index is None or index.dtype != torch.bool or index.device.type == "meta":
        return [index]
    return list(index.nonzero(as_tuple=True))


def _default_dtype(func: Any, args: tuple[Any, ...]) -> torch.dtype:
    whole = func.overloadpacket is aten.arange and all(isinstance(item, int) for item in args)
    return torch.int64 if whole else torch.get_default_dtype()


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """As much as the forward pass for each of the input's and the weight's gradient; torch's formula forgets groups."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = rest
    forward = conv_flop_count(list(inputs.shape), list(weight.shape), list(gradient.shape), transposed=transposed)
    return forward * (wanted[0] + wanted[1])


def _grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Experts' products: (rows, K) x (experts, K, N), (K, rows) x (rows, N) and the other two forms of ``_grouped_mm``.

    A dimension that is split among the experts is shared by both sides, or found once in the result; either way each of
    the left's elements meets N columns, except where both have an expert dimension.
    """
    return 2 * math.prod(left.shape) * right.shape[-1]


FORMULAS = flop_registry | {
    aten._grouped_mm: _grouped_product,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}
"""torch's formulas, those that it lacks or gets wrong, and attention's backward pass without scores computed again."""
