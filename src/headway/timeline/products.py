"""What matrix products compute and move, from the shapes and types of their operands as a trace has them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.timeline.kinds import Kind
from headway.timeline.timeline import UNKNOWN

DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
    "byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64", "bool": "bool",
}  # fmt: skip
"""Torch's name of a type by what traces call it, in lower case and without ``c10::``."""
MOST_FLOPS = 2**56
"""Of one product; more is no product that a device computes."""
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
"""Operators by the place of the first factor among their operands."""


@dataclass(frozen=True)
class Product:
    """One matrix product."""

    flops: int
    """2·m·n·k, times the batch."""
    bytes: int
    """Both factors read and the result written once, in the factors' type."""
    dtype: str


def product_of(operator: str, dimensions: str, types: str) -> Product | None:
    """The product that ``operator`` is; None for what is none or says too little.

    ``dimensions`` and ``types``: JSON of the event's ``Input Dims`` and ``Input type``.
    """
    first = _PRODUCTS.get(operator)
    if first is None:
        return None
    try:
        shapes, names = json.loads(dimensions), json.loads(types)
        left, right, dtype = shapes[first], shapes[first + 1], torch_dtype(names[first])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if not (_is_shape(left) and _is_shape(right)) or left[:-2] != right[:-2] or left[-1] != right[-2]:
        return None
    batch, (m, k), n = math.prod(left[:-2]), left[-2:], right[-1]
    size = 1 if dtype.startswith("float8") else _BYTES.get(dtype, 0)
    if not size or 2 * batch * m * n * k > MOST_FLOPS:
        return None
    return Product(2 * batch * m * n * k, size * batch * (m * k + k * n + m * n), dtype)


def products_of(
    columns: dict[str, NDArray[Any]], kind: NDArray[np.int8], strings: dict[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """FLOPs, bytes and dtype of operators that are matrix products, and of the longest kernel that each launched.

    -1, -1 and 0 where they are not known.
    """
    texts = list(strings)
    named = np.array([text in _PRODUCTS for text in texts], dtype=bool)
    products = np.flatnonzero((kind == Kind.OPERATOR) & named[columns["name"]] & (columns["Input Dims"] > 0))
    if not len(products):
        nothing = np.broadcast_to(np.int64(UNKNOWN), len(kind))
        return nothing, nothing, np.broadcast_to(np.int32(0), len(kind))
    flops, moved = (np.full(len(kind), UNKNOWN, dtype=np.int64) for _ in range(2))
    dtype = np.zeros(len(kind), dtype=np.int32)
    keys = np.stack([columns[key][products] for key in ("name", "Input Dims", "Input type")])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    found = [product_of(*(texts[place] for place in places)) for places in distinct.T.tolist()]
    which = which.ravel()
    flops[products] = np.array([UNKNOWN if one is None else one.flops for one in found])[which]
    moved[products] = np.array([UNKNOWN if one is None else one.bytes for one in found])[which]
    places = [0 if one is None else strings.setdefault(one.dtype, len(strings)) for one in found]
    dtype[products] = np.array(places, dtype=np.int32)[which]
    operator, known = columns["External id"], products[flops[products] > 0]
    known = known[operator[known] != UNKNOWN]
    known = known[np.argsort(operator[known], kind="stable")]
    kernels = np.flatnonzero((kind == Kind.COMPUTE) & (operator != UNKNOWN))
    if len(known) and len(kernels):
        # The longest of an operator first: others of it (a reduction, a bias) get none.
        kernels = kernels[np.lexsort((-columns["dur"][kernels], operator[kernels]))]
        longest = np.append(True, operator[kernels][1:] != operator[kernels][:-1])
        nearest = known[np.minimum(np.searchsorted(operator[known], operator[kernels]), len(known) - 1)]
        linked = longest & (operator[nearest] == operator[kernels])
        for column in (flops, moved, dtype):
            column[kernels[linked]] = column[nearest[linked]]
    return flops, moved, dtype


def torch_dtype(name: Any) -> str:
    """``bfloat16`` of ``c10::BFloat16``; "" for what is not known."""
    return DTYPES.get(name.removeprefix("c10::").lower(), "") if isinstance(name, str) else ""


def _is_shape(shape: Sequence[Any]) -> bool:
    return isinstance(shape, list) and 2 <= len(shape) <= 3 and all(type(size) is int and size > 0 for size in shape)
