"""One device: the model whole, without the hooks that sharding puts around every block.

``fully_shard`` over a single rank computes the same numbers, but it copies every parameter twice in each micro-batch
and runs Python around each of them: a step of a small model then takes 25 to 40 % longer on a CPU (``raw_fully_shard``
in benchmarks/trainer_overhead.py). Here the model computes with ordinary parameters in the compute dtype, and what
trains it gets DTensors on the mesh of one rank, with the names, dtypes and gradients that ``fully_shard`` would give.
"""

from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class OneDevice:
    """The master weights of a model on one rank, and the parameters in the compute dtype that the model uses."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, compute: torch.dtype, reduce: torch.dtype) -> None:
        self._model = proxy(model)
        self._mesh = mesh
        self._compute = compute
        self._reduce = reduce
        self._masters: dict[str, nn.Parameter] = {}
        self._used: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}
        self._stale = False
        self.last_micro_batch = True
        """Whether the next backward pass completes the gradients of a step."""

    def masters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name: DTensors in the master dtype."""
        if not self._masters:
            self._hold()
        return self._masters

    def expect_change(self) -> None:
        """Let the next forward pass see the masters as they are then."""
        self._stale = True

    def _hold(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                local = parameter.detach()
                self._masters[name] = nn.Parameter(DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False))
                self._used.append(parameter)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self._compute)  # in the same dtype: one memory for both

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the model compute with the masters as they are now."""
        masters = self.masters().values()
        if self._stale and any(master.dtype != self._compute for master in masters):
            torch._foreach_copy_(self._used, [_local(master) for master in masters])
        self._stale = False

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add up gradients in the reduce dtype; after a step's last backward pass, hand them to the masters."""
        if self._reduce == self._compute and not self.last_micro_batch:
            return  # autograd adds them up where they are
        added: list[tuple[Tensor, Tensor]] = []
        for index, used in enumerate(self._used):
            if used.grad is None:
                continue
            if index in self._sums:
                added.append((self._sums[index], used.grad))
            else:
                self._sums[index] = used.grad.to(self._reduce)
            used.grad = None
        if added:
            torch._foreach_add_([total for total, _ in added], [gradient for _, gradient in added])
        if self.last_micro_batch:
            masters = list(self._masters.values())
            for index, total in self._sums.items():
                masters[index].grad = _like(masters[index], total.to(masters[index].dtype))
            self._sums = {}
            self._stale = True


_models: WeakKeyDictionary[nn.Module, OneDevice] = WeakKeyDictionary()


def hold_whole(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Lay ``model`` out on the single rank of ``mesh``; it may still be on meta, and is filled before its first use."""
    held = OneDevice(model, mesh, compute, reduce)
    _models[model] = held
    model.register_forward_pre_hook(lambda module, arguments: held.refresh())


def held_whole(model: nn.Module) -> OneDevice | None:
    """The model's masters when it is held whole, None when it is sharded."""
    return _models.get(model)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _like(master: Any, gradient: Tensor) -> DTensor:
    return DTensor(gradient, master._spec, requires_grad=False)  # type: ignore[no-untyped-call]
