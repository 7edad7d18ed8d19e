"""Sharded data parallelism: FSDP2 in every layout of several ranks, from shards to replicas of one-rank shards.

In all of them, and on one rank, what is trained are DTensors in the master dtype, so that optimizers, checkpoints, EMA
and gradient norm have one code path.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.parallel.one_device import held_whole, hold_whole
from headway.recipe import PrecisionRecipe


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, precision: PrecisionRecipe) -> None:
    """Shard ``model`` in place (on the meta device or not): each block is a unit of gathering, the rest another.

    Parameters are gathered and used in ``precision.compute`` and gradients reduced in ``precision.reduce``. Inputs are
    not cast: timesteps and rotary tables stay in float32 as far as the model itself allows. On one rank there is
    nothing to gather or to reduce, and the model is held whole.
    """
    if mesh.size() == 1:
        hold_whole(model, mesh, getattr(torch, precision.compute), getattr(torch, precision.reduce))
        return
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


def reduce_gradients(model: nn.Module, on: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks; off for all micro-batches but the last.

    Without reduction gradients add up unsharded on each rank, in ``precision.reduce``.
    """
    held = held_whole(model)
    if held is not None:
        held.last_micro_batch = on
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def backward(model: nn.Module, loss: torch.Tensor) -> None:
    """Add the gradients of ``loss``, a scalar, to those of the model's trained parameters."""
    loss.backward()
    held = held_whole(model)
    if held is not None:
        held.take_gradients()
