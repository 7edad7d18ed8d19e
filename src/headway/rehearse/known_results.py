"""Results of operators on fake tensors, known from the first time that an operator met such shapes.

What an operator gives depends on nothing but shapes, strides, dtypes and plain arguments, and a step asks the same a
thousand times. ``FakeTensorMode`` has a cache of its own, with room for symbols, constants and every device, which a
rehearsal does not need: to make a result by it takes several times as long as here.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Key = tuple[Any, ...]
CPU = torch.device("cpu")
META = torch.device("meta")
PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
UNKNOWN = frozenset({"set_", "resize_", "lift_fresh", "_local_scalar_dense", "as_strided"})
"""Operators that look at more than metadata, or change it, and have no tag that tells so."""
TAGS = frozenset({torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Of such operators."""


class _Made(NamedTuple):
    """A tensor with memory of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _View(NamedTuple):
    """A tensor with the memory of an argument."""

    given: int
    """Which of the tensors among the arguments."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """From that of the argument, in elements."""


class _Given(NamedTuple):
    """An argument itself."""

    given: int


class _Several(NamedTuple):
    """A list or tuple."""

    kind: Callable[[Iterator[Any]], Any]
    items: tuple[Any, ...]


_known: dict[Key, Any] = {}
"""For the whole process: a key says all that matters. None: there is no result."""


class _NotKnown(Exception):  # noqa: N818 - no error
    """This call can't be told from others by a key, or its result not be made anew."""


class KnownResults:
    """Computes operators in one FakeTensorMode, inside of which it must be called."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._attributes = vars(FakeTensor(mode, torch.empty(0, device=META), CPU))

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``function``."""
        if not _is_told_by_metadata(function):
            return function(*args, **kwargs)
        given: list[FakeTensor] = []
        try:
            key = (function, _key(args, given), *((name, _key((value,), given)) for name, value in kwargs.items()))
        except _NotKnown:
            return function(*args, **kwargs)
        known = _known.get(key, _NotKnown)
        if known is _NotKnown:
            result = function(*args, **kwargs)
            with suppress(_NotKnown):
                _known[key] = _description(result, given)
            return result
        return self._made(known, given)

    def _made(self, known: Any, given: list[FakeTensor]) -> Any:
        kind = type(known)
        if kind is _Given:
            return given[known.given]
        if kind is _Several:
            return known.kind(self._made(item, given) for item in known.items)
        if kind is not _Made and kind is not _View:
            return known
        with torch._C._DisableTorchDispatch():
            element = torch.empty_strided(known.size, known.stride, dtype=known.dtype, device=META)
            if kind is _View:
                base = given[known.given]
                offset = base.storage_offset() + known.offset
                element.set_(base.untyped_storage(), offset, known.size, known.stride)
        result = Tensor._make_subclass(FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=CPU)  # type: ignore[call-arg]
        result.__dict__.update(self._attributes)
        torch._C._set_throw_on_mutable_data_ptr(result)
        return result


@cache
def _is_told_by_metadata(function: Any) -> bool:
    return function.namespace == "aten" and function._opname not in UNKNOWN and TAGS.isdisjoint(function.tags)


def _key(values: Any, given: list[FakeTensor]) -> Key:
    """Of arguments; their tensors go to ``given``."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.dtype.is_complex:
                raise _NotKnown
            given.append(value)
            found.append((value.shape, value.stride(), value.dtype))
        elif kind is list or kind is tuple:
            found.append(_key(value, given))
        elif value is None:
            found.append(None)
        elif isinstance(value, PLAIN) and value == value:
            found.append((kind, value))  # 1, 1.0 and True are equal
        else:
            raise _NotKnown
    return tuple(found)


def _description(result: Any, given: list[FakeTensor]) -> Any:
    """How to make ``result`` from other tensors in the places of ``given``."""
    if isinstance(result, list | tuple):
        if type(result) not in (list, tuple):
            raise _NotKnown
        items = tuple(_description(item, given) for item in result)
        storages = [item.untyped_storage()._cdata for item in result if isinstance(item, Tensor)]
        made = sum(isinstance(item, _Made) for item in items)
        if made > 1 and len(set(storages)) < len(storages):
            raise _NotKnown
        return _Several(type(result), items)
    if not isinstance(result, Tensor):
        if result is None or isinstance(result, PLAIN):
            return result
        raise _NotKnown
    if type(result) is not FakeTensor or result.constant is not None or result.dtype.is_complex:
        raise _NotKnown
    size, stride, storage = tuple(result.shape), result.stride(), result.untyped_storage()
    for place, tensor in enumerate(given):
        if result is tensor:
            return _Given(place)
        if storage._cdata == tensor.untyped_storage()._cdata:
            if result.dtype != tensor.dtype:
                raise _NotKnown
            return _View(place, size, stride, result.dtype, int(result.storage_offset() - tensor.storage_offset()))
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if result.storage_offset() or storage.nbytes() != (0 if 0 in size else extent) * result.element_size():
        raise _NotKnown
    return _Made(size, stride, result.dtype)
