"""Sharded data parallelism: FSDP2 in every layout of several ranks, from shards to replicas of one-rank shards.

In all of them, and on one rank, what is trained are DTensors in the master dtype, so that optimizers, checkpoints, EMA
and gradient norm have one code path.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.parallel.expert_parallel import shard_experts
from headway.parallel.float8 import find_gathered_scales, gathers_float8
from headway.parallel.masters import Masters
from headway.parallel.mesh import Meshes
from headway.parallel.one_device import OneDevice
from headway.parallel.pipeline import reshards_after_forward
from headway.recipe import LayoutRecipe, PrecisionRecipe


class LaidOut(Protocol):
    """A model in its layout: what this rank trains, and how the model sees changed weights."""

    def train(self, mode: bool) -> None:
        """Training or evaluation mode."""

    def parameters(self) -> dict[str, DTensor]:
        """The trainable parameters by name, in the master dtype. The model must have been filled."""

    def hand_over(self, masters: Masters) -> None:
        """Give the step's gradients, complete after the last backward pass, to the masters' shards."""

    def masters_changed(self) -> None:
        """Let the model compute with the masters as they are now: to be called after each change of them."""


class LaidOutWhole(LaidOut, Protocol):
    """One whose micro-batches go through the whole model on this rank, held or gathered block by block."""

    def begin_micro_batch(self, last: bool) -> None:
        """To be called before each forward pass; gradients are reduced over the ranks with the ``last`` one only."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, a scalar."""


class FullyShardedModel:
    """FSDP2 over two ranks or more."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._parameters: dict[str, DTensor] = {}
        self._gathers_float8 = gathers_float8(model)

    def train(self, mode: bool) -> None:
        """See LaidOut."""
        self._model.train(mode)

    def parameters(self) -> dict[str, DTensor]:
        """See LaidOut."""
        if not self._parameters:
            self.masters_changed()
            self._parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}  # type: ignore[misc]
        return self._parameters

    def begin_micro_batch(self, last: bool) -> None:
        """See LaidOutWhole. Without reduction gradients add up unsharded on each rank, in the reduce dtype."""
        for unit in self._units:
            unit.set_requires_gradient_sync(last, recurse=False)

    def backward(self, loss: Tensor) -> None:
        """See LaidOutWhole."""
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
        if self._gathers_float8:
            find_gathered_scales(self._model)


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], meshes: Meshes, precision: PrecisionRecipe, layout: LayoutRecipe
) -> LaidOutWhole:
    """Shard ``model`` in place (on the meta device or not): each block is a unit of gathering, the rest another.

    ``blocks`` are in the order in which they run. Those that are freed after their forward pass are gathered again for
    the backward pass, which begins with the last ones: ``layout.blocks_kept_gathered`` of them wait gathered instead,
    as the rest of the model always does; the later a block, the shorter that wait.

    Parameters are gathered and used in ``precision.compute`` and gradients reduced in ``precision.reduce``. Inputs are
    not cast: timesteps and rotary tables stay in float32 as far as the model itself allows. On one rank there is
    nothing to gather or to reduce, and the model is held whole.
    """
    compute, reduce = getattr(torch, precision.compute), getattr(torch, precision.reduce)
    if meshes.world == 1:
        return OneDevice(model, meshes.fsdp, compute, reduce)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    # The warning is of changing a returned view in place, which no objective does with a model's output.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    frees = _freed(blocks, layout)
    if meshes.sizes.ep > 1:
        data_ranks = meshes.fsdp.size()
        shard_experts(model, meshes.expert, policy, data_ranks=data_ranks, reshard_after_forward=frees)
    for block in blocks:
        fully_shard(block, mesh=meshes.fsdp, mp_policy=policy, reshard_after_forward=frees(block))
    root = fully_shard(model, mesh=meshes.fsdp, mp_policy=policy, reshard_after_forward=False)
    _gather_ahead(root, blocks, layout.prefetch)
    return FullyShardedModel(model)


def _freed(blocks: Sequence[nn.Module], layout: LayoutRecipe) -> Callable[[nn.Module], bool]:
    """Of a block or a module in one: whether it is freed between forward and backward."""
    if not reshards_after_forward(layout):
        return lambda module: False
    last = blocks[max(0, len(blocks) - layout.blocks_kept_gathered) :]
    kept = {module for block in last for module in block.modules()}
    return lambda module: module not in kept


def _gather_ahead(root: FSDPModule, blocks: Sequence[nn.Module], ahead: int) -> None:
    """Let each block gather those that come next, and the root the first ones.

    By itself FSDP2 does so in the backward pass only, and one.
    """
    units = [[child for child in block.modules() if isinstance(child, FSDPModule)] for block in blocks]
    if ahead:
        root.set_modules_to_forward_prefetch([unit for group in units[:ahead] for unit in group])
    for place, own in enumerate(units):
        later, earlier = units[place + 1 : place + 1 + ahead], units[max(0, place - ahead) : place]
        own[0].set_modules_to_forward_prefetch([unit for group in later for unit in group])
        own[0].set_modules_to_backward_prefetch([unit for group in reversed(earlier) for unit in group])
