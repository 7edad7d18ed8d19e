"""What quantisation's kernels are proven with: codes and scales must be those of the reference, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.kernels import quantise_reference, quantise_triton
from headway.kernels.proof.accuracy import Verdict
from headway.kernels.proof.interpreter import interpreted
from headway.kernels.proof.machine_code import Compiled
from headway.kernels.quantise_reference import BLOCKS, FORMATS, SCALINGS, SMALLEST, Quantised
from headway.kernels.quantise_triton import TILE, TYPES, WARPS, block_kernel, maxima_kernel, scaled_kernel

WITHOUT = frozenset({"sm_80"})
"""Targets without float8."""
RESULTS = ("codes", "scales", "transposed_codes", "transposed_scales")


@dataclass(frozen=True)
class Case:
    """A random matrix. ``strided``: a slice of the transpose of a larger one."""

    rows: int
    columns: int
    scaling: str
    number_format: str = "e4m3"
    dtype: torch.dtype = torch.bfloat16
    both: bool = True
    strided: bool = False
    magnitude: float = 1.0
    special: float | None = None
    """A number that stands in one place."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        how = ["both" if self.both else "", "strided" if self.strided else ""]
        size = f"x{self.magnitude:g}" if self.magnitude != 1 else ""
        special = "" if self.special is None else f"with {self.special}"
        named = [f"{self.rows}x{self.columns}", self.scaling, self.number_format, kind, *how, size, special]
        return " ".join(filter(None, named))


CASES = (
    *(Case(130, 200, scaling) for scaling in SCALINGS),
    *(Case(37, 65, scaling, "e5m2", torch.float32, strided=True) for scaling in SCALINGS),
    *(Case(128, 256, scaling, both=False, magnitude=1e-30, dtype=torch.float32) for scaling in ("row", "mx")),
    *(Case(40, 70, scaling, special=torch.nan) for scaling in ("tensor", "row", "block_1x128", "mx")),
    Case(40, 70, "mx", special=torch.inf),
    Case(33, 64, "mx", magnitude=0.0),
    Case(33, 64, "block_128x128", magnitude=1e30, dtype=torch.float32),
    Case(1, 1, "row"),
)


def matrix(case: Case, seed: int = 0) -> Tensor:
    """Made from ``seed``; rows of very unequal size."""
    random = torch.Generator().manual_seed(seed)
    shape = (case.columns + 3, case.rows + 5) if case.strided else (case.rows, case.columns)
    made = torch.randn(shape, generator=random) * torch.randn(shape[0], 1, generator=random).exp()
    made = (case.magnitude * made).to(case.dtype)
    made = made.mT[5:, 3:] if case.strided else made
    if case.special is not None:
        made[case.rows // 2, case.columns // 3] = case.special
    return made


def kernel(case: Case, x: Tensor, order: int | None = None) -> dict[str, Tensor]:
    """Results of the kernels, interpreted, with programs shuffled by ``order``."""
    with interpreted(order):
        results = quantise_triton.quantise_matrix(x, 1 + case.both, case.scaling, case.number_format)
    return _named(case, results)


def reference(case: Case, x: Tensor) -> dict[str, Tensor]:
    """The same of the reference."""
    once = quantise_reference.quantise(x, case.scaling, case.number_format)
    return _named(case, (*once, *quantise_reference.quantise(x.mT, case.scaling, case.number_format)))


def _named(case: Case, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(RESULTS, results, strict=True)) if case.both else dict(zip(RESULTS, results[:2], strict=False))


def check(case: Case, seed: int = 0) -> list[Verdict]:
    """Run the kernels on the interpreter: every bit must be the reference's, and numbers near what they stand for."""
    x = matrix(case, seed)
    found, right = kernel(case, x, order=seed), reference(case, x)
    verdicts = []
    for name in found:
        same = torch.equal(_bits(found[name]), _bits(right[name]))
        error = rounding_error(case, x, found, transposed=name.startswith("transposed")) if "codes" in name else 0.0
        verdicts.append(Verdict(name, error, 0.0, error - 1.0, 0.0, 0.0, same))
    return verdicts


def rounding_error(case: Case, x: Tensor, found: dict[str, Tensor], *, transposed: bool) -> float:
    """Largest distance of a number from its code's, over what rounding to the format may leave; at most 1 is right.

    That is half a unit in the last place, which below the smallest normal number is a fixed part of the scale; and the
    float32 arithmetic on the way. Where a scale is no number there is none.
    """
    prefix = "transposed_" if transposed else ""
    values = (x.mT if transposed else x).double()
    quantised = Quantised(found[f"{prefix}codes"], found[f"{prefix}scales"])
    stands_for = quantised.dequantised(case.scaling).double()
    ones = Quantised(torch.ones_like(quantised.codes, dtype=torch.float32), quantised.scales)
    scales = ones.dequantised(case.scaling).double()
    facts = torch.finfo(FORMATS[case.number_format])
    allowed = 0.5 * facts.eps * torch.maximum(values.abs(), facts.smallest_normal * scales) * (1 + 2**-20)
    error = (stands_for - values).abs() / allowed
    finite = error.isfinite()
    return float(error[finite].max()) if finite.any() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    kinds: dict[int, Any] = {1: torch.uint8, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def compiled() -> Iterator[Compiled]:
    """Each kernel on bfloat16, both layouts, as products use them."""
    common = {"LARGEST": 448.0, "FORMAT": TYPES["e4m3"], "BOTH": True, "TILE": TILE}
    lines: dict[str, Any] = {"BOTH": True, "TILE": TILE}
    yield _compiled("quantise, largest numbers", maxima_kernel, lines)
    yield _compiled("quantise, rows", scaled_kernel, common | {"ONE": False})
    for scaling, (down, across) in BLOCKS.items():
        sizes = {"DOWN": down, "ACROSS": across, "POWER": scaling == "mx", "SMALLEST": SMALLEST}
        yield _compiled(f"quantise, {scaling}", block_kernel, common | sizes)


def _compiled(name: str, function: Any, constants: dict[str, Any]) -> Compiled:
    kinds = {"x": "*bf16", "codes": "*fp8e4nv", "transposed": "*fp8e4nv"}
    scales = "*u8" if constants.get("POWER") else "*fp32"
    given = [each for each in function.arg_names if each not in constants]
    integers = ("row_stride", "column_stride", "rows", "columns")
    pointers = {each: kinds.get(each, scales) for each in given if each not in integers}
    scalars = {each: "i32" for each in integers if each != "column_stride"}
    return Compiled(
        name, function, pointers, scalars, constants | {"column_stride": 1}, WARPS, statistics=(4, 4), lacking=WITHOUT
    )
