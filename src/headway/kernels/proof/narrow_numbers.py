"""Triton's interpreter with the numbers of a GPU.

The stock interpreter computes on the bit patterns of bfloat16 and float8, and truncates where a GPU rounds to nearest
even (Triton's own manual calls bfloat16 unsupported there). Here an operation on narrow numbers is done in float32 and
rounded once, as the instructions do; float8 saturates as cvt.satfinite does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import (
    InterpreterBuilder,
    ReduceOps,
    ScanOps,
    TensorHandle,
    _get_np_dtype,
    _interpreter,
    _ir,
)

Array = NDArray[Any]

NARROW = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""Formats that NumPy lacks, by Triton's names."""

ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def is_narrow(dtype: tl.dtype) -> bool:
    """Whether the interpreter holds values of ``dtype`` as bit patterns."""
    return dtype.scalar.name in NARROW


def widened(data: Array, dtype: tl.dtype) -> Array:
    """The values of bit patterns, in float32; other data as it is."""
    if not is_narrow(dtype):
        return data
    return torch.from_numpy(np.array(data)).view(NARROW[dtype.scalar.name]).float().numpy()


def narrowed(values: Array, dtype: tl.dtype) -> Array:
    """Bit patterns of ``values`` rounded to nearest even; float8 saturates at its largest finite number."""
    if not is_narrow(dtype):
        return values.astype(_get_np_dtype(dtype.scalar))
    to = NARROW[dtype.scalar.name]
    wide = torch.from_numpy(np.array(values, dtype=np.float32))
    if to is not torch.bfloat16:
        wide = wide.clamp(-torch.finfo(to).max, torch.finfo(to).max)  # keeps NaN
    return wide.to(to).view(torch.uint16 if to is torch.bfloat16 else torch.uint8).numpy()


class NarrowBuilder(InterpreterBuilder):
    """The interpreter's operations, on values."""

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        """Between any two number formats, to nearest even."""
        if not (is_narrow(src.dtype) or is_narrow(dst_type)):
            return super().cast_impl(src, dst_type)
        return TensorHandle(narrowed(widened(src.data, src.dtype), dst_type), dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        """Raises NotImplementedError for a rounding other than to nearest even."""
        if rounding_mode not in (None, _ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding {rounding_mode}")
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[[Array, Array], Array]) -> TensorHandle:
        """Of narrow numbers, in float32 and rounded once."""
        if op in ON_BITS or not is_narrow(lhs.dtype):
            return super().binary_op(lhs, rhs, op)
        result = op(widened(lhs.data, lhs.dtype), widened(rhs.data, rhs.dtype))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(narrowed(result, lhs.dtype), lhs.dtype.scalar)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """The other number where one is NaN."""
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """The other number where one is NaN."""
        return self.binary_op(lhs, rhs, np.fmax)

    def unary_op(self, arg: TensorHandle, op: Callable[[Array], Array]) -> TensorHandle:
        """Of narrow numbers, in float32 and rounded once."""
        if not is_narrow(arg.dtype):
            return super().unary_op(arg, op)
        return TensorHandle(narrowed(op(widened(arg.data, arg.dtype)), arg.dtype), arg.dtype.scalar)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        """x·y + z rounded once: float32 products are exact in float64."""
        if z.data.dtype == np.float64:
            return super().create_fma(x, y, z)
        a, b, c = (widened(operand.data, operand.dtype).astype(np.float64) for operand in (x, y, z))
        return TensorHandle(narrowed(a * b + c, z.dtype), z.dtype.scalar)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
        """a @ b + d, accumulated in float32 (float64, int32) and rounded to the format of d."""
        accumulator = widened(d.data, d.dtype)
        wide = np.promote_types(accumulator.dtype, np.float32) if accumulator.dtype.kind == "f" else accumulator.dtype
        product = np.matmul(widened(a.data, a.dtype).astype(wide), widened(b.data, b.dtype).astype(wide))
        return TensorHandle(narrowed(product + accumulator, d.dtype), d.dtype.scalar)

    def get_bf16(self, value: float) -> TensorHandle:
        """A bfloat16 constant."""
        return TensorHandle(narrowed(np.array([value]), tl.bfloat16), tl.bfloat16)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, *order: Any
    ) -> TensorHandle:
        """Also adds bfloat16 numbers, each addition rounded. Raises NotImplementedError for others on them."""
        if not is_narrow(val.dtype):
            return super().create_atomic_rmw(op, ptr, val, mask, *order)
        if op != _ir.ATOMIC_OP.FADD:
            raise NotImplementedError(f"{op} of {val.dtype}")
        shape = np.shape(ptr.data)
        addresses, values, masks = (np.broadcast_to(each.data, shape).ravel() for each in (ptr, val, mask))
        before = np.zeros(addresses.shape, np.uint16)
        one = np.ones(1, bool)
        for index in np.flatnonzero(masks):
            address = addresses[index : index + 1].copy()  # the interpreter takes no views
            before[index : index + 1] = old = _interpreter.load(address, one, np.zeros(1, np.uint16), before.dtype)
            total = widened(old, val.dtype) + widened(values[index : index + 1], val.dtype)
            _interpreter.store(address, narrowed(total, val.dtype), one)
        return TensorHandle(before.reshape(shape), val.dtype.scalar)


def _on_values(reduced: Callable[..., Any], self: Any, tensor: Any, *arguments: Any, **keywords: Any) -> Any:
    """A fast reduction or scan of the interpreter, which takes the tensor's data for its values."""
    tensor = tensor[0] if isinstance(tensor, tuple) else tensor
    dtype = tensor.dtype
    if not is_narrow(dtype):
        return reduced(self, tensor, *arguments, **keywords)
    result = reduced(self, self.to_tensor(widened(tensor.handle.data, dtype), tl.float32), *arguments, **keywords)
    several = result if isinstance(result, list | tuple) else (result,)
    rounded = [
        self.to_tensor(narrowed(part.handle.data, dtype).reshape(part.shape or ())[()], dtype)
        if part.dtype == tl.float32
        else part
        for part in several
    ]
    return type(result)(rounded) if isinstance(result, list | tuple) else rounded[0]


class NarrowReduce(ReduceOps):
    """Reductions of values: narrow ones in float32, rounded at the end."""

    def sum(self, input: Any) -> Any:
        """Along the axis."""
        return _on_values(ReduceOps.sum, self, input)

    def min_max(self, input: Any, *operations: Any, **named: Any) -> Any:
        """Along the axis."""
        return _on_values(ReduceOps.min_max, self, input, *operations, **named)


class NarrowScan(ScanOps):
    """Scans of values: narrow ones in float32, rounded at the end."""

    def cumsum(self, input: Any) -> Any:
        """Along the axis."""
        return _on_values(ScanOps.cumsum, self, input)

    def cumprod(self, input: Any) -> Any:
        """Along the axis."""
        return _on_values(ScanOps.cumprod, self, input)
