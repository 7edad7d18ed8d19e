"""What a collective's operator does: kind, bytes, group, peer, and whether it is asynchronous."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from headway.rehearse.record import Collective, CollectiveKind, Group
from headway.rehearse.work import bytes_of, tensors_in

C10D: dict[str, CollectiveKind] = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
FUNCTIONAL: dict[str, CollectiveKind] = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def kind_of(namespace: str, name: str) -> CollectiveKind | None:
    """The kind of collective that an operator is; None: it is none."""
    if namespace == "c10d":
        return C10D.get(name)
    return FUNCTIONAL.get(name) if namespace == "_c10d_functional" else None


@dataclass
class Groups:
    """The process groups of a layout, by the axis that they belong to."""

    by_name: dict[str, str]
    """Torch's name of a group -> key in ``known``."""
    known: dict[str, Group]

    @staticmethod
    def of(meshes: list[DeviceMesh]) -> "Groups":
        """Each mesh has the dimensions of one layout of ranks; the same axis may be in several."""
        groups = Groups({}, {})
        for mesh in meshes:
            assert mesh.mesh_dim_names is not None
            for axis in mesh.mesh_dim_names:
                groups.add(mesh.get_group(axis), axis)
        return groups

    def add(self, group: dist.ProcessGroup, axis: str) -> str:
        """Know ``group`` by ``axis``, or by ``axis 2`` and so on where another group has that."""
        if group.group_name not in self.by_name:
            key, number = axis, 1
            while key in self.known:
                number += 1
                key = f"{axis} {number}"
            self.by_name[group.group_name] = key
            self.known[key] = Group(axis, tuple(dist.get_process_group_ranks(group)))
        return self.by_name[group.group_name]

    def collective(
        self, function: Any, kind: CollectiveKind, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Collective:
        """One call of a collective's operator."""
        group = _group_of(function, args)
        key = self.add(group, "world" if group.size() == dist.get_world_size() else "other")
        given, made = list(tensors_in((args, kwargs))), list(tensors_in(result))
        # Of the whole tensor: where one side has a rank's part, the other has all of it.
        size = max(sum(map(bytes_of, some)) for some in (given[:1], given[1:2], made))
        peer = -1
        if kind in ("send", "recv"):
            peer = self.known[key].ranks[args[2]]
        return Collective(kind, key, size, _is_asynchronous(function, args, kwargs), peer)


def _group_of(function: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    if function.namespace == "_c10d_functional":
        return _resolve_process_group([argument for argument in args if isinstance(argument, str)][-1])  # type: ignore[arg-type]
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise TypeError(f"{function} was called without a process group")


def _is_asynchronous(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A default argument is left out of what an operator is called with, and the default is asynchronous."""
    if function.namespace == "_c10d_functional":
        return True
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "async_op":
            return bool(args[place] if place < len(args) else kwargs.get("async_op", True))
    return True
