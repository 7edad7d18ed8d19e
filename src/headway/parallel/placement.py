"""Where the pieces of a DTensor are: which ranks hold it together, and what each of them has."""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def index(self) -> tuple[slice, ...]:
        """To index the whole tensor with."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def sharded_axes(tensor: DTensor) -> list[int]:
    """Dimensions of the mesh over which a tensor is split, not repeated."""
    # Not is_shard(): what FSDP2 makes of an axis over a tensor-parallel one is another class than Shard.
    return [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def number_of_pieces(tensor: DTensor) -> int:
    """How many ranks hold one copy of the tensor together: as many as ``pieces``, which takes long for many ranks."""
    return math.prod(tensor.device_mesh.size(axis) for axis in sharded_axes(tensor))


def holders(tensor: DTensor) -> dist.ProcessGroup | None:
    """The ranks that hold one copy of the tensor together, this one among them; None when each holds it whole.

    The first call for a pair of axes makes a process group: all ranks must make the same calls in the same order.
    """
    mesh, axes = tensor.device_mesh, sharded_axes(tensor)
    if not axes or math.prod(mesh.size(axis) for axis in axes) == 1:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    assert mesh.mesh_dim_names is not None
    names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
    return mesh[names]._flatten("_".join(names)).get_group()


def own_piece(tensor: DTensor) -> Piece:
    """What this rank has."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(tuple(offset), tuple(shape))


def pieces(tensor: DTensor) -> list[Piece]:
    """What each rank of ``holders`` has, in the order of that group."""
    mesh, axes = tensor.device_mesh, sharded_axes(tensor)
    found = []
    for place in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        coordinate = [0] * mesh.ndim
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        shape, offset = _compute_local_shape_and_global_offset(
            tensor.shape, torch.Size(mesh.shape), coordinate, tensor.placements
        )
        found.append(Piece(tuple(offset), tuple(shape)))
    return found
