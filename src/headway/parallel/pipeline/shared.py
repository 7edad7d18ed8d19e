"""Parameters that two stages use, such as an embedding tied to the head.

The earlier stage owns the parameter: it alone is trained, checkpointed, averaged and counted in the gradient norm. The
later one computes with a copy, whose gradient is added to the owner's, and which takes the owner's value whenever that
has changed; so the two are always equal, bit by bit. Both must be sharded alike.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.parallel.pipeline.split import Shared, Split


class SharedParameters:
    """Keeps owners and copies together. All ranks of the pipeline must make the same calls in the same order."""

    def __init__(self, split: Split, group: dist.ProcessGroup) -> None:
        self._split = split
        self._group = group
        self._modules = {stage.index: stage.module for stage in split.stages}
        self._copied = False

    def copies(self, stage: int) -> set[str]:
        """Names of the copies that ``stage`` computes with."""
        return {shared.user_name for shared in self._split.shared if shared.user == stage}

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Give the copies' gradients to their owners. FSDP2 must have reduced both."""
        for shared in self._split.shared:
            if shared.trains:
                gradient = self._moved(shared.user, shared.owner, self._take_gradient(shared), like=shared.owner_name)
                if gradient is not None:
                    _local(self._parameter(shared.owner, shared.owner_name).grad).add_(gradient)

    @torch.no_grad()
    def copy_values(self) -> None:
        """Give the owners' values to their copies. Parameters must be sharded, not gathered."""
        for shared in self._split.shared:
            if shared.trains or not self._copied:
                value = self._value(shared.owner, shared.owner_name)
                value = self._moved(shared.owner, shared.user, value, like=shared.user_name)
                if value is not None:
                    _local(self._parameter(shared.user, shared.user_name)).copy_(value)
        self._copied = True

    def _take_gradient(self, shared: Shared) -> Tensor | None:
        if shared.user not in self._modules:
            return None
        parameter = self._parameter(shared.user, shared.user_name)
        gradient, parameter.grad = parameter.grad, None
        return _local(gradient)

    def _value(self, stage: int, name: str) -> Tensor | None:
        return _local(self._parameter(stage, name)) if stage in self._modules else None

    def _parameter(self, stage: int, name: str) -> Tensor:
        return self._modules[stage].get_parameter(name)

    def _moved(self, source: int, target: int, value: Tensor | None, like: str) -> Tensor | None:
        """On the rank of stage ``target``: the ``value`` that the rank of ``source`` has, of the shape of ``like``."""
        sender, receiver = self._split.plan.rank_of(source), self._split.plan.rank_of(target)
        if sender == receiver:
            return value
        if self._split.rank == sender:
            assert value is not None
            dist.send(value.contiguous(), group=self._group, group_dst=receiver)
        elif self._split.rank == receiver:
            arrived = torch.empty_like(_local(self._parameter(target, like)))
            dist.recv(arrived, group=self._group, group_src=sender)
            return arrived
        return None


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
