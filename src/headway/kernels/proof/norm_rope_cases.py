"""What the kernels of norms and rotary embeddings of heads are proven with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import norm_rope_triton
from headway.kernels.norm_rope_triton import backward_kernel, blocks_and_warps, forward_kernel
from headway.kernels.proof.accuracy import Verdict, judge
from headway.kernels.proof.interpreter import interpreted
from headway.kernels.proof.machine_code import Compiled

EPSILON = 1e-6
NAMES = ("x", "then", "weight", "then_weight")


@dataclass(frozen=True)
class Case:
    """Random inputs. ``strided``: heads are slices of wider projections, tables columns of wider ones."""

    samples: int
    tokens: int
    heads: int
    channels: int
    dtype: torch.dtype = torch.bfloat16
    then: int = 0
    """Tokens of the second stream."""
    norm: str = "head"
    """"head", "across" or "none"."""
    pairs: str = "half"
    rotated: int | None = None
    """Pairs; None: half the channels, 0: no tables."""
    by_sample: bool = False
    """A table for each sample."""
    strided: bool = False
    magnitude: float = 1.0
    programs: int = 3
    """Of backward: few, so that several tokens share one."""

    def __str__(self) -> str:
        how = [self.norm, self.pairs, f"{self.turned} pairs", "by sample" if self.by_sample else ""]
        how += ["strided" if self.strided else "", f"x{self.magnitude:g}" if self.magnitude != 1 else ""]
        shape = f"{self.samples}x{self.tokens}+{self.then}x{self.heads}x{self.channels}"
        return " ".join(filter(None, [shape, str(self.dtype).removeprefix("torch."), *how]))

    @property
    def turned(self) -> int:
        """Pairs that are rotated."""
        return self.channels // 2 if self.rotated is None else self.rotated


CASES = (
    Case(2, 3, 3, 16, then=2, pairs="interleaved", strided=True),
    Case(2, 3, 2, 24, norm="across", pairs="interleaved", rotated=8),
    Case(2, 3, 1, 20, torch.float32, by_sample=True, rotated=4, strided=True),
    Case(1, 4, 3, 10, torch.float16, norm="none", by_sample=True),
    Case(1, 3, 2, 12, norm="head", rotated=0, then=2),
    Case(1, 3, 2, 16, norm="across", then=2, magnitude=1e15),
    Case(1, 3, 2, 16, torch.float32, pairs="interleaved", magnitude=1e-15),
)


@dataclass(frozen=True)
class Inputs:
    """Of forward, and the gradient that backward is given."""

    x: Tensor
    then: Tensor | None
    weight: Tensor | None
    then_weight: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    grad_output: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """All of ``dtype``."""
        return Inputs(**{name: None if t is None else t.to(dtype) for name, t in vars(self).items()})  # type: ignore[arg-type]


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Made from ``seed``; the tables in float32, in float64 for a case in float64."""
    random = torch.Generator().manual_seed(seed)
    wider = 3 if case.strided else 1

    def heads(tokens: int, magnitude: float = 1.0) -> Tensor:
        shape = (case.samples, tokens, case.heads * wider, case.channels)
        made = (magnitude * torch.randn(shape, generator=random)).to(case.dtype)
        return made[:, :, case.heads * (wider - 1) :]

    def weight() -> Tensor | None:
        count = {"head": case.channels, "across": case.heads * case.channels, "none": 0}[case.norm]
        return torch.randn(count, generator=random).to(case.dtype) if count else None

    def tables() -> tuple[Tensor | None, Tensor | None]:
        samples = case.samples if case.by_sample else 1
        angles = torch.randn((samples, case.tokens + case.then, case.turned), generator=random).double() * 3
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        made = (table.to(wide).repeat_interleave(wider, -1)[..., ::wider] for table in (angles.cos(), angles.sin()))
        return next(made), next(made)

    x, then = heads(case.tokens, case.magnitude), heads(case.then, case.magnitude) if case.then else None
    cos, sin = tables() if case.turned else (None, None)
    own = weight()
    return Inputs(x, then, own, weight() if case.then else None, cos, sin, heads(case.tokens + case.then))


def eager(given: Inputs, case: Case) -> dict[str, Tensor]:
    """Results of PyTorch's own operations, and of autograd, in the dtype of the inputs."""
    leaves = {n: getattr(given, n).detach().requires_grad_() for n in NAMES if getattr(given, n) is not None}
    streams = []
    for stream, weight in (("x", "weight"), ("then", "then_weight")):
        if stream not in leaves:
            continue
        values = leaves[stream]
        if case.norm == "across":
            values = F.rms_norm(values.flatten(2), (case.heads * case.channels,), eps=EPSILON) * leaves[weight]
            values = values.unflatten(2, (case.heads, case.channels))
        elif case.norm == "head":
            values = F.rms_norm(values, (case.channels,), eps=EPSILON) * leaves[weight]
        streams.append(values)
    output = torch.cat(streams, 1)
    if given.cos is not None and given.sin is not None:
        output = _rotated(output, given.cos[:, :, None], given.sin[:, :, None], case)
    gradients = torch.autograd.grad(output, list(leaves.values()), given.grad_output)
    return {"output": output.detach()} | {f"grad_{n}": g for n, g in zip(leaves, gradients, strict=True)}


def _rotated(values: Tensor, cos: Tensor, sin: Tensor, case: Case) -> Tensor:
    """By complex numbers' product written out on the channels, as libraries do."""
    pairs = case.turned
    turned, rest = values[..., : 2 * pairs], values[..., 2 * pairs :]
    if case.pairs == "interleaved":
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        across = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        across = torch.cat([-turned[..., pairs:], turned[..., :pairs]], -1)
    return torch.cat([(turned * cos + across * sin).to(values.dtype), rest], -1)


def kernel(given: Inputs, case: Case, order: int | None = None) -> dict[str, Tensor]:
    """Results of the kernels, interpreted, with programs shuffled by ``order``."""
    tensors = given.x, given.then, given.weight, given.then_weight, given.cos, given.sin
    how = case.pairs == "interleaved", case.norm == "across", EPSILON
    with interpreted(order):
        output = norm_rope_triton.forward(*tensors, *how)
        gradients = norm_rope_triton.backward(given.grad_output, *tensors, *how, case.programs)
    x, then, weight, then_weight = gradients
    named = {"x": x, "then": then, "weight": weight, "then_weight": then_weight}
    return {"output": output} | {f"grad_{n}": g for n, g in named.items() if getattr(given, n) is not None}


def check(case: Case, seed: int = 0) -> list[Verdict]:
    """Run the kernels on the interpreter and judge every result."""
    given = inputs(case, seed)
    results = kernel(given, case, order=seed)
    same, exact = eager(given, case), eager(given.to(torch.float64), case)
    return [judge(name, result, same[name], exact[name]) for name, result in results.items()]


def compiled() -> Iterator[Compiled]:
    """Heads of 128 channels in bfloat16, all rotated by float32 tables: Flux's, Qwen3's, Wan 14B's."""
    shapes = {
        "per head, interleaved pairs": (24, False, True),
        "per head, half pairs": (32, False, False),
        "across 40 heads, interleaved pairs": (40, True, True),
    }
    for name, (heads, across, interleaved) in shapes.items():
        for direction, function in (("forward", forward_kernel), ("backward", backward_kernel)):
            shape, _, warps = blocks_and_warps(heads, 128, across, direction)
            how = {"NORMED": True, "ROTATED": True, "INTERLEAVED": interleaved, "PARTIAL": False, "ACROSS": across}
            constants = how | shape
            names = [each for each in function.arg_names if each not in constants]
            wide = {"cos", "sin", "grad_weight"}
            narrow = {"grad", "x", "weight", "output", "grad_x"}
            pointers = {each: "*fp32" if each in wide else "*bf16" for each in names if each in wide | narrow}
            scalars = {each: "fp32" if each == "epsilon" else "i32" for each in names if each not in pointers}
            narrow_loads = int(interleaved and not across)
            counts = {"samples_tokens", "tokens", "all_tokens", "tokens_per_chunk", "before", "heads", "head_blocks"}
            yield Compiled(
                f"norm_rope {direction}, {name}",
                function,
                pointers,
                scalars,
                constants,
                warps,
                odd=frozenset(counts & set(scalars)),
                statistics=(narrow_loads, 0 if across or direction == "forward" else 1 if interleaved else 2),
            )
