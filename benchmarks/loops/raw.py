"""The loop that a demanding engineer writes by hand for one model and layout: nothing in it can be left out.

It knows that every sample and token counts alike, so it needs no global denominator. Optimizer, norm and average work
on plain local tensors, with multi-tensor functions; loss and norm share one collective and one host read.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loops.task import HandAverage, Task, Tensors


class Weights(Protocol):
    """Float32 weights on this rank, and how their gradients come about."""

    local: list[nn.Parameter]

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradient."""

    def synchronise(self, last: bool) -> None:
        """Called before each micro-batch's forward pass."""

    def gradients_done(self) -> None:
        """After the last backward pass: put gradients on ``local``."""

    def updated(self) -> None:
        """After the optimizer step: let the model use the new weights."""


class PlainWeights:
    """One rank, float32: the model's own parameters."""

    def __init__(self, task: Task) -> None:
        self.local = list(task.model.parameters())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def synchronise(self, last: bool) -> None:
        pass

    def gradients_done(self) -> None:
        pass

    def updated(self) -> None:
        pass


class MasterWeights:
    """One rank, bfloat16 model: float32 weights beside it, gradients added up in float32."""

    def __init__(self, task: Task) -> None:
        self.used = list(task.model.parameters())
        self.local = [nn.Parameter(parameter.detach().clone()) for parameter in self.used]
        for parameter in self.used:
            parameter.data = parameter.data.to(task.compute)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self.local[0].grad is None:
            for weight, parameter in zip(self.local, self.used, strict=True):
                assert parameter.grad is not None
                weight.grad = parameter.grad.float()
        else:
            torch._foreach_add_([w.grad for w in self.local], [p.grad for p in self.used])
        for parameter in self.used:
            parameter.grad = None

    def synchronise(self, last: bool) -> None:
        pass

    def gradients_done(self) -> None:
        pass

    @torch.no_grad()
    def updated(self) -> None:
        torch._foreach_copy_(self.used, self.local)


class ShardedWeights:
    """FSDP2 on the blocks and the root; optimizer and average see the local shards as plain tensors."""

    def __init__(self, task: Task, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(task.compute, torch.float32, cast_forward_inputs=False)
        for block in task.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(task.model, mesh=mesh, mp_policy=policy)
        self.sharded = list(task.model.parameters())
        self.local = [nn.Parameter(parameter.to_local().detach()) for parameter in self.sharded]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def synchronise(self, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)

    @torch.no_grad()
    def gradients_done(self) -> None:
        for weight, parameter in zip(self.local, self.sharded, strict=True):
            weight.grad = parameter.grad.to_local()
            parameter.grad = None

    def updated(self) -> None:
        pass


class RawLoop:
    """Steps by hand. ``mesh``: shard over it, also over one rank; None: one rank, nothing sharded."""

    def __init__(self, task: Task, mesh: DeviceMesh | None) -> None:
        self.task = task
        self.world = 1 if mesh is None else mesh.size()
        self.weights: Weights
        if mesh is not None:
            self.weights = ShardedWeights(task, mesh)
        elif task.compute == torch.float32:
            self.weights = PlainWeights(task)
        else:
            self.weights = MasterWeights(task)
        self.optimizer = task.optimizer(self.weights.local)
        self.average = HandAverage(task, self.weights.local)
        self.number = 0

    def step(self, batches: list[Tensors]) -> float:
        """One optimizer step; returns the global mean loss."""
        task, weights = self.task, self.weights
        losses = []
        for index, batch in enumerate(batches):
            weights.synchronise(last=index == len(batches) - 1)
            loss = task.loss(task.model, batch) / len(batches)
            weights.backward(loss)
            losses.append(loss.detach())
        weights.gradients_done()
        gradients = [weight.grad for weight in weights.local]
        norms = torch.stack(torch._foreach_norm(gradients))
        totals = torch.stack([torch.stack(losses).sum() / self.world, norms.square().sum()])
        if self.world > 1:
            dist.all_reduce(totals)
        mean_loss, squared_norm = totals.tolist()
        limit = task.recipe.optim.clip_norm
        if limit is not None and squared_norm > limit**2:
            torch._foreach_mul_(gradients, limit / squared_norm**0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = task.recipe.optim.lr * task.lr_factor(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        weights.updated()
        self.average.update(self.number)
        self.number += 1
        return float(mean_loss)
