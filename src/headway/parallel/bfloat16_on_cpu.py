"""bfloat16 matrix products on processors without bfloat16 instructions, at close to float32 speed.

There PyTorch's own bfloat16 products take several times as long as float32 ones (benchmarks/bfloat16_on_cpu.py). A
product of two bfloat16 numbers is exact in float32, so a float32 product of the same operands, rounded once at the end,
is what a tensor core computes: the same numbers up to the order of summation.
"""

import warnings
from typing import Any

import torch

PRODUCTS = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}
"""Operator -> how many of its results are bfloat16; attention's second, the log-sum-exp, is float32 in either dtype."""
_library: list[torch.library.Library] = []


def has_bfloat16_instructions() -> bool:
    """Whether this processor multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def emulate_bfloat16_products() -> None:
    """From now on, in this process, compute eager bfloat16 products on CPU in float32 and round the results.

    Operators of other dtypes and devices, and compiled graphs, are untouched. Calling it again changes nothing.
    """
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, rounded in PRODUCTS.items():
            library.impl(name, _in_float32(f"aten::{name}", rounded), "CPU", with_keyset=True, allow_override=True)
    _library.append(library)


def _in_float32(operator: str, rounded: int) -> Any:
    kernel = torch.library.get_kernel(operator, "CPU")

    def product(keys: Any, first: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if first.dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, first, *arguments, **keywords)
        widened = [_widened(argument) for argument in arguments]
        named = {name: _widened(argument) for name, argument in keywords.items()}
        result = kernel.call_boxed(keys, first.float(), *widened, **named)
        if isinstance(result, tuple):
            return *(item.bfloat16() for item in result[:rounded]), *result[rounded:]
        return result.bfloat16()

    return product


def _widened(argument: Any) -> Any:
    return argument.float() if isinstance(argument, torch.Tensor) else argument
