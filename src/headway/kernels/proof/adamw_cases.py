"""What AdamW's kernel is proven with."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.kernels import adamw_reference, adamw_triton
from headway.kernels.adamw_triton import BLOCK, TYPES, WARPS, adamw_kernel
from headway.kernels.proof.accuracy import Verdict, judge
from headway.kernels.proof.interpreter import interpreted
from headway.kernels.proof.machine_code import Compiled
from headway.kernels.stochastic_rounding import Place, key_of, place_of

LR, BETAS, EPSILON, DECAY, UPDATES = 0.01, (0.9, 0.95), 1e-8, 0.1, 3
RESULTS = ("weights", "exp_avgs", "exp_avg_sqs", "averages")
TABLES_READ = 13
"""Numbers that a program reads of the tables: its block, addresses, place, key, scale, decay, weights of averages."""


@dataclass(frozen=True)
class Case:
    """Shards of tensors: (whole shape, offset, shape)."""

    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    weight: torch.dtype = torch.bfloat16
    gradient: torch.dtype = torch.bfloat16
    averages: int = 1
    stochastic: bool = True
    magnitude: float = 1.0
    shifted: bool = False
    """Tensors begin one element after what 16 divides."""

    def __str__(self) -> str:
        how = "stochastic" if self.stochastic else "nearest"
        size = f"x{self.magnitude:g}" if self.magnitude != 1 else ""
        shapes = ",".join("x".join(map(str, shape)) for *_, shape in self.boxes)
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.weight, self.gradient)]
        return " ".join(filter(None, [shapes, *dtypes, how, f"{self.averages} averages", size]))


def whole(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A tensor that is not cut."""
    return shape, (0,) * len(shape), shape


CASES = (
    Case((whole(96, 16), whole(7), whole(40, 64), whole(33)), averages=2),
    Case((((9, 20), (4, 0), (5, 20)), ((8, 32), (2, 8), (3, 16)), ((4, 6, 10), (1, 2, 3), (2, 3, 5)))),
    Case((whole(64, 32), whole(5)), torch.float32, torch.float32, stochastic=False, averages=0),
    Case((whole(48, 16), whole(16, 1)), torch.bfloat16, torch.float32, shifted=True),
    Case((whole(32, 32),), magnitude=1e15),
    Case((whole(32, 32),), torch.float16, torch.float16, stochastic=False, magnitude=1e-3),
    Case((((0,), (0,), (0,)), whole(131)), averages=0),
)


@dataclass(frozen=True)
class Inputs:
    """Tensors of each kind, and what numbers their elements."""

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    averages: list[Tensor]
    places: list[Place]
    keys: list[int]

    def to(self, dtype: torch.dtype | None = None) -> "Inputs":
        """Copies, all of ``dtype`` if one is given."""
        copied: dict[str, Any] = {
            name: [t.to(dtype or t.dtype, copy=True) for t in value]
            for name, value in vars(self).items()
            if name not in ("places", "keys")
        }
        return replace(self, **copied)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Made from ``seed``."""
    random = torch.Generator().manual_seed(seed)

    def drawn(dtype: torch.dtype, magnitude: float = 1.0) -> list[Tensor]:
        made = []
        for *_, shape in case.boxes:
            values = magnitude * torch.randn(math.prod(shape), generator=random)
            buffer = torch.empty(values.numel() + 8, dtype=dtype)[int(case.shifted) :]
            made.append(buffer[: values.numel()].copy_(values).view(shape))
        return made

    weights = drawn(case.weight, case.magnitude)
    return Inputs(
        weights=weights,
        gradients=drawn(case.gradient),
        exp_avgs=drawn(torch.float32, 0.1),
        exp_avg_sqs=[tensor.square_() for tensor in drawn(torch.float32)],
        averages=[tensor for _ in range(case.averages) for tensor in drawn(torch.float32, case.magnitude)],
        places=[place_of(*box) for box in case.boxes] if case.stochastic else [],
        keys=[key_of(seed, "proof", str(number)) for number in range(len(case.boxes))] if case.stochastic else [],
    )


def updated(way: Any, given: Inputs, step: int = 5) -> dict[str, Tensor]:
    """What ``way.update`` makes of ``given``, which it changes: each kind end to end."""
    kinds = (given.weights, given.gradients, given.exp_avgs, given.exp_avg_sqs, given.averages)
    count = len(given.weights)
    way.update(
        *kinds,
        torch.tensor(0.5),
        [1 - LR * DECAY] * count,
        [0.1 * (number + 1) for number in range(len(given.averages) // count)],
        LR / (1 - BETAS[0] ** UPDATES),
        BETAS,
        EPSILON,
        math.sqrt(1 - BETAS[1] ** UPDATES),
        given.places,
        given.keys,
        step,
    )
    flat = {name: [tensor.flatten() for tensor in getattr(given, name)] for name in RESULTS}
    return {name: torch.cat(tensors) for name, tensors in flat.items() if tensors}


def kernel(given: Inputs, order: int | None = None) -> dict[str, Tensor]:
    """Results of the kernel, interpreted, with programs shuffled by ``order``."""
    kinds = (given.weights, given.gradients, given.exp_avgs, given.exp_avg_sqs, given.averages)
    with interpreted(order, reached=[tensor for kind in kinds for tensor in kind]):
        return updated(adamw_triton, given)


def check(case: Case, seed: int = 0) -> list[Verdict]:
    """Run the kernel on the interpreter and judge every result: what rounds at random against the same bits."""
    given = inputs(case, seed)
    results = kernel(given.to(), order=seed)
    same = updated(adamw_reference, given.to())
    wide = given.to(torch.float64)
    exact = updated(adamw_reference, replace(wide, places=[], keys=[]))
    verdicts = []
    for name, result in results.items():
        if not result.numel():
            continue
        if case.stochastic and name in ("weights", "averages"):
            verdicts.append(_within_a_unit(name, result, same[name]))
        else:
            verdicts.append(judge(name, result, same[name], exact[name]))
    return verdicts


def _within_a_unit(name: str, result: Tensor, eager: Tensor) -> Verdict:
    """Of what is rounded at random: equal but where float32's last bits decide between two neighbours."""
    error = (result.double() - eager.double()).abs()
    rounding = torch.finfo(torch.float32).eps * eager.double().abs().max()
    unit = torch.finfo(torch.bfloat16).eps * eager.double().abs()
    differing = float((error > rounding).double().mean())
    return Verdict(name, float(error.max()), 0.0, float((error - unit - rounding).max()), differing, 2**-8, True)


def compiled() -> Iterator[Compiled]:
    """As the weights of a model are stepped: bfloat16, gradients in bfloat16 and float32, one average or none."""
    for gradient, averages in ((torch.bfloat16, 1), (torch.float32, 0)):
        names = adamw_kernel.arg_names
        constants = {
            "AVERAGES": averages,
            "WEIGHT": TYPES[torch.bfloat16],
            "GRADIENT": TYPES[gradient],
            "ALIGNED": True,
            "CONTIGUOUS": True,
            "STOCHASTIC": True,
            "BLOCK": BLOCK,
        }
        tables = {"work": "*i64", "table": "*i64", "keeps": "*fp32", "average_weights": "*fp32", "scale": "*fp32"}
        scalars = {name: "fp32" for name in names if name not in tables and name not in constants}
        scalars["step"] = "i32"
        yield Compiled(
            f"adamw, {str(gradient).removeprefix('torch.')} gradients, {averages} averages",
            adamw_kernel,
            tables,
            scalars,
            constants,
            WARPS,
            odd=frozenset({"step"}),
            statistics=(TABLES_READ, 0),
        )
