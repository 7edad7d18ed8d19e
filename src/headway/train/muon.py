"""Muon (Jordan 2024) over sharded matrices, equal to torch.optim.Muon on one device.

Newton-Schulz needs the whole matrix: orthogonalising shards is another optimizer, and matrix products of DTensors
round differently in bfloat16. So each matrix has one owning rank. One all-to-all brings the owners their matrices in
bfloat16 (the dtype Newton-Schulz starts from), another takes the orthogonalised pieces back. Work, traffic and memory
fall with the number of ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# torch has no public name for the two functions that its Muon is made of.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from headway.parallel import Piece, holders, pieces


class ShardedMuon(torch.optim.Muon):
    """torch.optim.Muon for shards of matrices (rows, columns), split over any dimensions of their mesh, uneven or not.

    Replicas each do the work of their own pieces.
    """

    def __init__(self, shards: Mapping[str, nn.Parameter], whole: Mapping[str, DTensor], **settings: Any) -> None:
        super().__init__(shards.values(), **settings)
        by_group: dict[dist.ProcessGroup | None, list[_Matrix]] = {}
        for name, shard in shards.items():
            matrix = _Matrix(shard, whole[name].shape, pieces(whole[name]))
            by_group.setdefault(holders(whole[name]), []).append(matrix)
        self._by_group = by_group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update: momentum on the shards, Newton-Schulz on whole matrices, update and decay on the shards."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        (settings,) = self.param_groups

        def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
            return _zeropower_via_newtonschulz(
                matrix, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
            )

        for group, held in self._by_group.items():
            matrices = [matrix for matrix in held if matrix.shard.grad is not None]
            updates = [self._momentum(matrix.shard, settings) for matrix in matrices]
            for matrix, update in zip(matrices, _on_whole(orthogonalise, matrices, updates, group), strict=True):
                matrix.shard.mul_(1 - settings["lr"] * settings["weight_decay"])
                rate = _adjust_lr(settings["lr"], settings["adjust_lr_fn"], matrix.shape)
                matrix.shard.add_(update, alpha=-rate)
        return loss

    def _momentum(self, shard: nn.Parameter, settings: dict[str, Any]) -> torch.Tensor:
        assert shard.grad is not None
        state = self.state[shard]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(shard)
        momentum: torch.Tensor = state["momentum_buffer"]
        momentum.lerp_(shard.grad, 1 - settings["momentum"])
        return shard.grad.lerp(momentum, settings["momentum"]) if settings["nesterov"] else momentum


@dataclass(frozen=True)
class _Matrix:
    """A matrix of which this rank holds a shard."""

    shard: nn.Parameter
    shape: torch.Size
    pieces: list[Piece]
    """What each rank of the group holds, in the group's order."""

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The piece of ``rank``."""
        return whole[self.pieces[rank].index()]


def _on_whole(
    function: Callable[[torch.Tensor], torch.Tensor],
    matrices: list[_Matrix],
    shards: list[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """Apply ``function`` (matrix to matrix of the same shape, in bfloat16) to the matrices behind the shards."""
    if group is None:
        return [function(shard.bfloat16()) for shard in shards]
    if not matrices:
        return []
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    owners = _owners([matrix.shape for matrix in matrices], world)
    by_owner = [[i for i, owner in enumerate(owners) if owner == other] for other in range(world)]

    # To the owners: from each rank its piece of my matrices.
    outgoing = [[shards[i].bfloat16().flatten() for i in indices] for indices in by_owner]
    mine = [matrices[i] for i in by_owner[rank]]
    sizes = [[matrix.pieces[other].numel() for matrix in mine] for other in range(world)]
    arrived = _exchange(outgoing, sizes, group, shards[0].device)
    results = []
    for number, matrix in enumerate(mine):
        whole = torch.empty(matrix.shape, dtype=torch.bfloat16, device=shards[0].device)
        for other in range(world):
            piece = matrix.take(whole, other)
            piece.copy_(arrived[other][number].view(piece.shape))
        results.append(function(whole))

    # And back: to each rank its piece of the results.
    outgoing = [
        [matrix.take(result, other).flatten() for matrix, result in zip(mine, results, strict=True)]
        for other in range(world)
    ]
    sizes = [[shards[i].numel() for i in indices] for indices in by_owner]
    arrived = _exchange(outgoing, sizes, group, shards[0].device)
    updates = {
        i: piece
        for indices, found in zip(by_owner, arrived, strict=True)
        for i, piece in zip(indices, found, strict=True)
    }
    return [updates[i].view(shard.shape) for i, shard in enumerate(shards)]


def _owners(shapes: list[torch.Size], world: int) -> list[int]:
    """The rank that orthogonalises each matrix: the largest work first, each to the rank that has least to do."""
    work = [rows * columns * min(rows, columns) for rows, columns in shapes]
    loads = [0] * world
    owners = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -work[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += work[i]
    return owners


def _exchange(
    outgoing: list[list[torch.Tensor]], sizes: list[list[int]], group: dist.ProcessGroup, device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``outgoing[r]`` (flat bfloat16 pieces) to each rank r; get from each the pieces of ``sizes`` numbers."""
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    sent = torch.cat([empty, *(piece for found in outgoing for piece in found)])
    received = torch.empty(sum(map(sum, sizes)), dtype=torch.bfloat16, device=device)
    # As bytes, because not every backend moves every dtype.
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [2 * sum(found) for found in sizes],
        [2 * sum(piece.numel() for piece in found) for found in outgoing],
        group=group,
    )
    split = iter(torch.split(received, [size for rank_sizes in sizes for size in rank_sizes]))
    return [[next(split) for _ in rank_sizes] for rank_sizes in sizes]
