"""Counts what a real step sends: a dispatch mode that sees every collective, whoever calls it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from communication.traffic import Traffic, all_gather, all_reduce, all_to_all, reduce_scatter, send
from headway.parallel import Meshes

WORLD = "world"
"""The axis of what goes over all ranks: the Trainer's own sums."""
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "recv_", "barrier"}


def axes_of(meshes: Meshes) -> dict[str, str]:
    """Name of a process group -> the mesh axis that it is of."""
    size = meshes.sizes
    found = {WORLD: dist.group.WORLD, "pp": meshes.pp.get_group(), "tp": meshes.tp.get_group()}
    found |= {name: meshes.fsdp.get_group(name) for name in meshes.fsdp.mesh_dim_names or ()}
    if size.cp > 1:
        found |= {name: meshes.cp.get_group(name) for name in ("cp_ring", "cp_ulysses")}
    if size.ep > 1:
        found |= {name: meshes.expert.get_group(name) for name in ("expert_shard", "ep")}
    names = {group.group_name: axis for axis, group in found.items() if group is not None}
    assert len(names) == len(found), "two axes share a process group: their traffic can't be told apart"
    return names


class Recorder(TorchDispatchMode):
    """Adds up what this rank sends while it is entered, by mesh axis and collective.

    It sees the operators of ``c10d`` (FSDP2, the pipeline's transfers) and of ``_c10d_functional`` (DTensor, context
    and expert parallelism), in forward and backward. Fails on one that it does not know.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it turns into operators on ordinary tensors, which come here again
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in SILENT:
            self._note(func._opname, args, result)
        return result

    def _note(self, operator: str, args: tuple[Any, ...], result: Any) -> None:
        group = _group(args)
        axis, ranks = self._axes[group.group_name], group.size()
        self.traffic += COLLECTIVES[operator](axis, ranks, args, result)


def _group(args: tuple[Any, ...]) -> Any:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    name = [argument for argument in args if isinstance(argument, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor))


def _functional_all_to_all(axis: str, ranks: int, args: tuple[Any, ...], result: Any) -> Traffic:
    return _leaving(axis, ranks, tensor=args[0], sent=args[2], group=_group(args))


def _all_to_all_base(axis: str, ranks: int, args: tuple[Any, ...], result: Any) -> Traffic:
    return _leaving(axis, ranks, tensor=args[1], sent=args[4], group=_group(args))


def _leaving(axis: str, ranks: int, tensor: Tensor, sent: list[int], group: Any) -> Traffic:
    """``sent``: rows of dimension 0 for each rank; empty: as many for each."""
    rows = sent or [len(tensor) // ranks] * ranks
    others = sum(rows) - rows[group.rank()]
    return all_to_all(axis, ranks, others * _bytes(tensor[:1]))


COLLECTIVES: dict[str, Callable[[str, int, tuple[Any, ...], Any], Traffic]] = {
    "all_reduce": lambda axis, ranks, args, result: all_reduce(axis, ranks, _bytes(args[0])),
    "all_reduce_": lambda axis, ranks, args, result: all_reduce(axis, ranks, _bytes(args[0])),
    "allreduce_": lambda axis, ranks, args, result: all_reduce(axis, ranks, _bytes(args[0])),
    "all_gather_into_tensor": lambda axis, ranks, args, result: all_gather(axis, ranks, _bytes(result)),
    "_allgather_base_": lambda axis, ranks, args, result: all_gather(axis, ranks, _bytes(args[0])),
    "reduce_scatter_tensor": lambda axis, ranks, args, result: reduce_scatter(axis, ranks, _bytes(args[0])),
    "_reduce_scatter_base_": lambda axis, ranks, args, result: reduce_scatter(axis, ranks, _bytes(args[1])),
    "all_to_all_single": _functional_all_to_all,
    "alltoall_base_": _all_to_all_base,
    "send": lambda axis, ranks, args, result: send(axis, _bytes(args[0])),
}
