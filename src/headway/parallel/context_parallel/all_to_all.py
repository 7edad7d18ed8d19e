"""Moving tokens between the ranks of a sequence, with gradients: sequence against heads, and gathering a sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sequence_to_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, H, S/n, D) of this rank's tokens to (B, H/n, S, D) of this rank's heads, in rank order."""
    return _Exchange.apply(tensor, 1, 2, group) if group.size() > 1 else tensor


def heads_to_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, H/n, S, D) of this rank's heads to (B, H, S/n, D) of this rank's tokens."""
    return _Exchange.apply(tensor, 2, 1, group) if group.size() > 1 else tensor


def gather(tensor: Tensor, dim: int, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """Concatenate the ranks' pieces along ``dim``; ``groups`` from the outermost to the innermost.

    The gradient of a piece is its part of the gradient of the whole, as one rank has it: all ranks must compute the
    same from the whole.
    """
    for group in reversed(groups):
        if group.size() > 1:
            tensor = _Gather.apply(tensor, dim, group)
    return tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scattered: int, gathered: int, group: dist.ProcessGroup) -> Tensor:
        ctx.scattered, ctx.gathered, ctx.group = scattered, gathered, group
        return _exchange(tensor, scattered, gathered, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradients[0], ctx.gathered, ctx.scattered, ctx.group), None, None, None


def _exchange(tensor: Tensor, scattered: int, gathered: int, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    pieces = tensor.unflatten(scattered, (ranks, -1)).movedim(scattered, 0).contiguous()
    received = all_to_all(pieces, [1] * ranks, [1] * ranks, group)
    return received.movedim(0, gathered).flatten(gathered, gathered + 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        operators = torch.ops._c10d_functional
        pieces = operators.all_gather_into_tensor(piece.movedim(dim, 0).contiguous(), group.size(), group.group_name)
        return operators.wait_tensor(pieces).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of dimension 0 to and from each rank, as many as the lists say. Waits."""
    operators = torch.ops._c10d_functional
    result: Tensor = operators.wait_tensor(operators.all_to_all_single(rows, received, sent, group.group_name))
    return result
