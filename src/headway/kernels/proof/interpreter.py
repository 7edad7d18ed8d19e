"""Runs Triton kernels on CPU tensors, with a GPU's numbers, in any order of programs, and watches every access.

The stock interpreter runs programs one after another and reads whatever lies beside a tensor; a race or an access out
of bounds passes. Here an address that no tensor of the launch holds is refused, and so is one that a program touches
after another program of the launch has written it.
"""

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (patched together with tl: _patch_lang takes what this module sees)
from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter, TensorHandle, _get_np_dtype
from triton.runtime.jit import JITFunction

from headway.kernels.proof.narrow_numbers import Array, NarrowBuilder, NarrowReduce, NarrowScan

NOBODY = -1


class IllegalAccess(Exception):  # noqa: N818 - it names what happened
    """A program touched memory outside of the launch's tensors, or memory that another program writes."""


class WatchingBuilder(NarrowBuilder):
    """Loads and stores that are checked against the tensors of the launch."""

    def launch(self, tensors: list[torch.Tensor], grid: tuple[int, int, int]) -> None:
        """Begin a launch on ``grid``, of which only elements of ``tensors`` may be touched."""
        self.set_grid_dim(*grid)
        self.addresses = np.unique(np.concatenate([_addresses(tensor) for tensor in tensors]))
        self.writers = np.full(self.addresses.shape, NOBODY)

    def run(self, program: int, place: tuple[int, int, int]) -> None:
        """Say which program runs from here on."""
        self.program = program
        self.set_grid_idx(*place)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *options: Any
    ) -> TensorHandle:
        """Raises IllegalAccess."""
        self._alone(self._held(ptrs.data, mask.data, "reads"), "reads")
        return super().create_masked_load(ptrs, mask, other, *options)

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *options: Any) -> None:
        """Raises IllegalAccess; also for a value of another width than the element's."""
        if value.data.dtype.itemsize != _get_np_dtype(ptrs.get_element_ty()).itemsize:
            raise IllegalAccess(f"program {self.grid_idx} stores {value.data.dtype} to {ptrs.dtype}")
        found = self._held(ptrs.data, mask.data, "writes")
        self._alone(found, "writes")
        self.writers[found] = self.program
        super().create_masked_store(ptrs, value, mask, *options)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, *order: Any
    ) -> TensorHandle:
        """Raises IllegalAccess out of bounds; programs may meet here."""
        self._held(ptr.data, mask.data, "adds")
        return super().create_atomic_rmw(op, ptr, val, mask, *order)

    def _held(self, pointers: Array, mask: Array, does: str) -> Array:
        """Places in ``addresses`` of what the mask lets through."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        active = pointers[mask]
        found = np.minimum(np.searchsorted(self.addresses, active), len(self.addresses) - 1)
        outside = int(np.sum(self.addresses[found] != active))
        if outside:
            raise IllegalAccess(f"program {self.grid_idx} {does} out of bounds: {outside} addresses")
        return found

    def _alone(self, found: Array, does: str) -> None:
        if not np.isin(self.writers[found], (NOBODY, self.program)).all():
            raise IllegalAccess(f"program {self.grid_idx} {does} what another program of the launch has written")


def _addresses(tensor: torch.Tensor) -> Array:
    """Of every element, in bytes."""
    offsets = np.zeros(1, np.uint64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.uint64) * np.uint64(stride)).ravel()
    return np.uint64(tensor.data_ptr()) + offsets * np.uint64(tensor.element_size())


def _seen_by_kernels() -> None:
    """A function whose globals hold the language, which is all that _patch_lang asks of a kernel."""


@contextmanager
def interpreted(order: int | None = None, reached: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Within it, ``kernel[grid](…)`` takes CPU tensors. Programs run in their order, or shuffled by seed ``order``.

    ``reached``: tensors that kernels find by addresses in a table, and may touch as if they were given to them.
    Memory from torch.empty is filled with NaN, so that what a kernel leaves unwritten shows. Raises IllegalAccess.
    """
    builder = WatchingBuilder()
    rewritten: dict[Any, Any] = {}

    def function(kernel: JITFunction) -> Any:
        if kernel.fn not in rewritten:
            rewritten[kernel.fn] = FunctionRewriter(kernel.fn).rewrite_ast()
        return rewritten[kernel.fn]

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        _run_grid(kernel, function(kernel), builder, grid, order, reached, arguments, keywords)

    def call(kernel: JITFunction, *arguments: Any, **keywords: Any) -> Any:
        return function(kernel)(*arguments, **keywords)

    deterministic = torch.are_deterministic_algorithms_enabled()
    with (
        patch.object(interpreter.interpreter_semantic, "builder", builder),
        patch.object(interpreter, "ReduceOps", NarrowReduce),
        patch.object(interpreter, "ScanOps", NarrowScan),
        patch.object(JITFunction, "run", run),
        patch.object(JITFunction, "__call__", call),
        np.errstate(all="ignore"),  # NaN, infinities and overflow are values here, as on a GPU
    ):
        scope = interpreter._patch_lang(_seen_by_kernels)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            scope.restore()


def _run_grid(
    kernel: JITFunction,
    function: Any,
    builder: WatchingBuilder,
    grid: tuple[int, ...],
    order: int | None,
    reached: Sequence[torch.Tensor],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    named = {name: value for name, value in keywords.items() if name in kernel.arg_names}
    given = inspect.getcallargs(kernel.fn, *arguments, **named)
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    converted = {name: value if name in constants else _as_argument(value) for name, value in given.items()}
    x, y, z = (*grid, 1, 1)[:3]
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    builder.launch([*tensors, *reached], (x, y, z))
    places = list(enumerate(product(range(x), range(y), range(z))))
    if order is not None:
        random.Random(order).shuffle(places)
    for program, place in places:
        builder.run(program, place)
        function(**converted)


def _as_argument(value: Any) -> Any:
    """As a kernel is given it: a Python float arrives as float32."""
    if isinstance(value, float):
        return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
    return interpreter._implicit_cvt(value)
