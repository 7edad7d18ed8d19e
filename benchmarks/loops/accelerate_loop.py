"""The same training with Accelerate, as its guides show it: prepare, accumulate, backward, clip_grad_norm_."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

from loops.task import HandAverage, Task, Tensors


class AccelerateLoop:
    """Steps with Accelerate. Raises RuntimeError when it does not shard over more than one rank."""

    def __init__(self, task: Task, world: int) -> None:
        self.task = task
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="no" if task.compute == torch.float32 else "bf16",
            gradient_accumulation_steps=task.accumulation,
            fsdp_plugin=_fsdp2(task) if world > 1 else None,
        )
        optimizer = task.optimizer(list(task.model.parameters()))
        self.model, self.optimizer = self.accelerator.prepare(task.model, optimizer)
        if world > 1 and not isinstance(self.model, FSDPModule):
            raise RuntimeError(
                f"no FSDP2 on CPU: given FullyShardedDataParallelPlugin(fsdp_version=2), Accelerator.prepare says "
                f"{self.accelerator.distributed_type} and returns {type(self.model).__name__}, without an error"
            )
        # Not prepared: a prepared scheduler advances once for every rank in each step.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, task.lr_factor)
        self.average = HandAverage(task, self.model.parameters())
        self.number = 0

    def step(self, batches: list[Tensors]) -> float:
        """One optimizer step; returns the global mean loss."""
        losses = []
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                loss = self.task.loss(self.model, batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.task.recipe.optim.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        self.scheduler.step()
        self.average.update(self.number)
        self.number += 1
        return float(self.accelerator.reduce(torch.stack(losses).mean(), "mean").item())


def _fsdp2(task: Task) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(block).__name__ for block in task.blocks}),
    )
