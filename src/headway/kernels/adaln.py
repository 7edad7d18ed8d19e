"""adaLN-Zero glue as one operator: gated residual, LayerNorm or RMSNorm, modulate; forward and backward."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from headway.kernels import adaln_reference
from headway.kernels.wide import wide_dtype

Norm = Literal["layer", "rms"]


def adaln(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
    norm: Norm = "layer",
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream h = x + gate·branch and norm(h)·(1 + scale) + shift.

    Without a gate h = x + branch; without a branch h is x itself.

    Args:
        x, branch: [samples, tokens, width], of one dtype, which is that of both results.
        scale, shift, gate: [samples, rows, width]; tokens are split evenly among rows in their order: one row a sample,
            one a frame or one a token. Any floating dtype, one for scale and shift.
        norm: "layer" (without affine parameters) or "rms".
    Raises:
        ValueError: shapes or dtypes do not go together.
    Inputs are never written to and may have any strides. Sums are in float32 (float64 if x is), gradients of the
    parameters in a fixed order: the same bits in every run.
    """
    _check(x, branch, gate, scale, shift, norm)
    hidden, output, _, _ = adaln_forward(x, branch, gate, scale, shift, norm, epsilon)
    return (x if branch is None else hidden), output


def _check(x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, norm: str) -> None:
    if norm not in ("layer", "rms"):
        raise ValueError(f"adaln: norm {norm!r} is neither 'layer' nor 'rms'")
    if branch is None and gate is not None:
        raise ValueError("adaln: there is a gate and no branch")
    if x.ndim != 3 or (branch is not None and (branch.shape != x.shape or branch.dtype != x.dtype)):
        raise ValueError("adaln: x is [samples, tokens, width], and branch has its shape and dtype")
    if scale.dtype != shift.dtype:
        raise ValueError(f"adaln: scale is {scale.dtype}, shift {shift.dtype}")
    for name, parameter in (("scale", scale), ("shift", shift), ("gate", gate)):
        if parameter is None:
            continue
        if parameter.shape != scale.shape or parameter.shape[::2] != x.shape[::2]:
            raise ValueError(
                f"adaln: {name} {list(parameter.shape)} is not [samples, rows, width] of x {list(x.shape)}"
            )
        if parameter.shape[1] == 0 or x.shape[1] % parameter.shape[1]:
            raise ValueError(f"adaln: {x.shape[1]} tokens do not divide among {parameter.shape[1]} rows of {name}")


@torch.library.custom_op("headway::adaln", mutates_args=())
def adaln_forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, norm: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h (empty without a branch), output, mean and 1/deviation of each token."""
    return adaln_reference.forward(x, branch, gate, scale, shift, norm, epsilon)


@torch.library.custom_op("headway::adaln_backward", mutates_args=())
def adaln_backward(
    grad_hidden: Tensor | None,
    grad_output: Tensor,
    hidden: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, branch, gate (both empty without a gate), scale and shift: see the reference."""
    return adaln_reference.backward(grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd, norm)


@adaln_forward.register_kernel("cuda")
def _(x, branch, gate, scale, shift, norm, epsilon):
    from headway.kernels import adaln_triton

    way = adaln_triton if adaln_triton.fits(x) else adaln_reference
    return way.forward(x, branch, gate, scale, shift, norm, epsilon)


@adaln_backward.register_kernel("cuda")
def _(grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd, norm):
    from headway.kernels import adaln_triton

    way = adaln_triton if adaln_triton.fits(hidden) else adaln_reference
    return way.backward(grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd, norm)


@adaln_forward.register_fake
def _(x, branch, gate, scale, shift, norm, epsilon):
    statistics = x.new_empty(x.shape[:2], dtype=wide_dtype(x.dtype))
    hidden = x.new_empty(0 if branch is None else x.shape)
    return hidden, x.new_empty(x.shape), statistics, torch.empty_like(statistics)


@adaln_backward.register_fake
def _(grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd, norm):
    return (
        hidden.new_empty(hidden.shape),
        hidden.new_empty(0 if gate is None else hidden.shape),
        scale.new_empty(0) if gate is None else gate.new_empty(gate.shape),
        scale.new_empty(scale.shape),
        scale.new_empty(scale.shape),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, gate, scale, _, norm, _ = inputs
    hidden, _, mean, rstd = output
    kept = None if gate is None else branch
    ctx.save_for_backward(x if branch is None else hidden, kept, gate, scale, mean, rstd)
    ctx.norm, ctx.added = norm, branch is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # zeros made for a DTensor that no one used would be a plain tensor


def _differentiate(
    ctx: Any, grad_hidden: Tensor | None, grad_output: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # asked for once: checkpointing recomputes them then
    hidden, _, gates = saved[:3]
    if grad_output is None:
        grad_output = torch.zeros_like(hidden)
    if not ctx.added:
        grad_hidden = None
    elif grad_hidden is None:
        grad_hidden = torch.zeros_like(hidden)
    x, branch, gate, scale, shift = adaln_backward(grad_hidden, grad_output, *saved, ctx.norm)
    if gates is None:
        return x, x if ctx.added else None, None, scale, shift, None, None
    return x, branch, gate, scale, shift, None, None


adaln_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _placements(tokens: Any, parameter: Any) -> list[tuple[Placement, Placement, Placement]]:
    """Ways to split the work over a mesh axis: placements of tokens, of parameters and of the parameters' gradients.

    Samples always split. Tokens split where every shard keeps whole runs of tokens that read the same row.
    """
    ways: list[tuple[Placement, Placement, Placement]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Shard(0), Shard(0)),
    ]
    rows = parameter.shape[1]
    if rows == 1:
        ways.append((Shard(1), Replicate(), Partial()))
    elif rows == tokens.shape[1] or rows % tokens.mesh.size() == 0:
        ways.append((Shard(1), Shard(1), Shard(1)))
    return ways


def _if(given: Any, placement: Placement) -> Placement:
    """What is empty without ``given`` is on every rank as it is."""
    return Replicate() if given is None else placement


@register_sharding(torch.ops.headway.adaln.default)
def _(x, branch, gate, scale, shift, norm, epsilon):
    added, gated = branch is not None, gate is not None
    return [
        (
            [_if(branch, tokens), tokens, tokens, tokens],
            [tokens, tokens if added else None, rows if gated else None, rows, rows, None, None],
        )
        for tokens, rows, _ in _placements(x, scale)
    ]


@register_sharding(torch.ops.headway.adaln_backward.default)
def _(grad_hidden, grad_output, hidden, branch, gate, scale, mean, rstd, norm):
    added, gated = grad_hidden is not None, gate is not None
    return [
        (
            [tokens, _if(gate, tokens), _if(gate, grad), grad, grad],
            [
                tokens if added else None,
                tokens,
                tokens,
                tokens if gated else None,
                rows if gated else None,
                rows,
                tokens,
                tokens,
                None,
            ],
        )
        for tokens, rows, grad in _placements(hidden, scale)
    ]
