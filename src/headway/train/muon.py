"""Muon (Jordan 2024) over sharded matrices, equal to torch.optim.Muon on one device.

Newton-Schulz needs the whole matrix: orthogonalising shards is another optimizer, and matrix products of DTensors
round differently in bfloat16. So each matrix has one owning rank. One all-to-all brings the owners their matrices in
bfloat16 (the dtype Newton-Schulz starts from), another takes the orthogonalised slices back. Work, traffic and memory
fall with the number of ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch has no public name for the two functions that its Muon is made of.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


class ShardedMuon(torch.optim.Muon):
    """torch.optim.Muon for DTensors sharded over the last dimension of their mesh with Shard(0), uneven or not.

    Matrices are (rows, columns); all must lie on one mesh. Replicas each do the work of their own shards.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update: momentum on the shards, Newton-Schulz on whole matrices, update and decay on the shards."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters: list[Any] = []
            gradients: list[Any] = []
            momenta: list[Any] = []
            self._init_group(group, parameters, gradients, momenta)
            updates = []
            for gradient, momentum in zip(gradients, momenta, strict=True):
                gradient, momentum = gradient.to_local(), momentum.to_local()
                momentum.lerp_(gradient, 1 - group["momentum"])
                updates.append(gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)

            def orthogonalise(matrix: torch.Tensor, group: dict[str, Any] = group) -> torch.Tensor:
                return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

            for parameter, update in zip(parameters, _on_whole(orthogonalise, parameters, updates), strict=True):
                shard = parameter.to_local()
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))
        return loss


def _on_whole(
    function: Callable[[torch.Tensor], torch.Tensor], parameters: list[Any], shards: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Apply ``function`` (matrix to matrix of the same shape, in bfloat16) to the matrices behind the shards."""
    if not parameters:
        return []
    group = parameters[0].device_mesh.get_group(parameters[0].device_mesh.ndim - 1)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    owners = _owners([parameter.shape for parameter in parameters], world)
    by_owner = [[i for i, owner in enumerate(owners) if owner == other] for other in range(world)]
    rows = [_rows_by_rank(parameter.shape[0], world) for parameter in parameters]

    # To the owners: from each rank its rows of my matrices.
    outgoing = [[shards[i].bfloat16().flatten() for i in indices] for indices in by_owner]
    mine = by_owner[rank]
    sizes = [[rows[i][other] * parameters[i].shape[1] for i in mine] for other in range(world)]
    arrived = _exchange(outgoing, sizes, group, shards[0].device)
    whole = [torch.cat([pieces[k] for pieces in arrived]).view(parameters[i].shape) for k, i in enumerate(mine)]

    # And back: to each rank its rows of the results.
    results = [torch.split(function(matrix), rows[i]) for i, matrix in zip(mine, whole, strict=True)]
    outgoing = [[result[other].flatten() for result in results] for other in range(world)]
    sizes = [[shards[i].numel() for i in indices] for indices in by_owner]
    arrived = _exchange(outgoing, sizes, group, shards[0].device)
    updates = {
        i: piece
        for indices, pieces in zip(by_owner, arrived, strict=True)
        for i, piece in zip(indices, pieces, strict=True)
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


def _rows_by_rank(rows: int, world: int) -> list[int]:
    """How many rows Shard(0) leaves on each rank: full chunks, then a smaller one, then none."""
    chunk = -(-rows // world)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(world)]


def _exchange(
    outgoing: list[list[torch.Tensor]], sizes: list[list[int]], group: dist.ProcessGroup, device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``outgoing[r]`` (flat bfloat16 pieces) to each rank r; get from each the pieces of ``sizes`` numbers."""
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    sent = torch.cat([empty, *(piece for pieces in outgoing for piece in pieces)])
    received = torch.empty(sum(map(sum, sizes)), dtype=torch.bfloat16, device=device)
    # As bytes, because not every backend moves every dtype.
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [2 * sum(pieces) for pieces in sizes],
        [2 * sum(piece.numel() for piece in pieces) for pieces in outgoing],
        group=group,
    )
    pieces = iter(torch.split(received, [size for rank_sizes in sizes for size in rank_sizes]))
    return [[next(pieces) for _ in rank_sizes] for rank_sizes in sizes]
