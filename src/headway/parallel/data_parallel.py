"""Sharded data parallelism: FSDP2 in every layout of several ranks, from shards to replicas of one-rank shards.

In all of them, and on one rank, what is trained are DTensors in the master dtype, so that optimizers, checkpoints, EMA
and gradient norm have one code path.
"""

import warnings
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.parallel.masters import Masters
from headway.parallel.one_device import OneDevice
from headway.recipe import PrecisionRecipe


class LaidOut(Protocol):
    """A model in its layout: how gradients come about on this rank, and how the model sees changed weights."""

    def parameters(self) -> dict[str, DTensor]:
        """The trainable parameters by name, in the master dtype. The model must have been filled."""

    def begin_micro_batch(self, last: bool) -> None:
        """To be called before each forward pass; gradients are reduced over the ranks with the ``last`` one only."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, a scalar."""

    def hand_over(self, masters: Masters) -> None:
        """Give the step's gradients, complete after the last backward pass, to the masters' shards."""

    def masters_changed(self) -> None:
        """Let the model compute with the masters as they are now: to be called after each change of them."""


class FullyShardedModel:
    """FSDP2 over two ranks or more."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._parameters: dict[str, DTensor] = {}

    def parameters(self) -> dict[str, DTensor]:
        """See LaidOut."""
        if not self._parameters:
            self.masters_changed()
            self._parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}  # type: ignore[misc]
        return self._parameters

    def begin_micro_batch(self, last: bool) -> None:
        """See LaidOut. Without reduction gradients add up unsharded on each rank, in the reduce dtype."""
        for unit in self._units:
            unit.set_requires_gradient_sync(last, recurse=False)

    def backward(self, loss: Tensor) -> None:
        """See LaidOut."""
        loss.backward()

    def hand_over(self, masters: Masters) -> None:
        """See LaidOut."""
        for parameter, shard in zip(self.parameters().values(), masters.local.values(), strict=True):
            gradient = parameter.grad
            if gradient is None:
                shard.grad = None
            else:
                shard.grad = gradient._local_tensor  # type: ignore[attr-defined]
                parameter.grad = None

    def masters_changed(self) -> None:
        """Free the gathered parameters that FSDP2 keeps after a forward pass (the root's: until the next backward one).

        Without this a forward pass after a change of the shards would still see the old values, and
        ``named_parameters`` would hand out the gathered copies.
        """
        for unit in self._units:
            unit.reshard()


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, precision: PrecisionRecipe) -> LaidOut:
    """Shard ``model`` in place (on the meta device or not): each block is a unit of gathering, the rest another.

    Parameters are gathered and used in ``precision.compute`` and gradients reduced in ``precision.reduce``. Inputs are
    not cast: timesteps and rotary tables stay in float32 as far as the model itself allows. On one rank there is
    nothing to gather or to reduce, and the model is held whole.
    """
    if dist.get_world_size() == 1:
        return OneDevice(model, mesh, getattr(torch, precision.compute), getattr(torch, precision.reduce))
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute),
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=False,
    )
    # The warning is of changing a returned view in place, which no objective does with a model's output.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return FullyShardedModel(model)
