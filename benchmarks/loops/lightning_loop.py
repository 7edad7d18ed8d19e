"""The same training with Lightning, as its documentation shows it. Lightning owns its loop: it asks for the batches."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loops.task import HandAverage, Task, Tensors


class Batches:
    """What Lightning iterates: micro-batches as they are asked for, with a length, so that none is fetched ahead."""

    def __init__(self, batches: Iterator[Tensors], length: int) -> None:
        self.batches = batches
        self.length = length

    def __iter__(self) -> Iterator[Tensors]:
        return self.batches

    def __len__(self) -> int:
        return self.length


class Module(LightningModule):
    """The task as a LightningModule; ``losses`` holds the global mean loss of each step."""

    def __init__(self, task: Task, world: int, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.task = task
        self.model = task.model
        self.world = world
        self.micro_losses: list[Tensor] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """FSDP2 on the blocks and the root, with more than one rank."""
        if self.world == 1:
            return
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(self.task.compute, torch.float32, cast_forward_inputs=False)
        for block in self.task.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with its schedule by step; not fused in mixed precision, where Lightning refuses to clip for it."""
        optimizer = self.task.optimizer(list(self.model.parameters()), fused=not self.mixed)
        self.average = HandAverage(self.task, self.model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.task.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Tensors, index: int) -> Tensor:
        """Mean loss of a micro-batch, logged over all ranks."""
        loss = self.task.loss(self.model, batch)
        self.log("loss", loss, sync_dist=self.world > 1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensors, index: int) -> None:
        """After each optimizer step: the average, and one host read of the loss."""
        self.micro_losses.append(self.trainer.callback_metrics["loss"])
        if len(self.micro_losses) == self.task.accumulation:
            self.average.update(len(self.losses))
            self.losses.append(float(torch.stack(self.micro_losses).mean().item()))
            self.micro_losses.clear()


class LightningLoop:
    """Steps with Lightning, on batches that the caller's iterator gives out."""

    def __init__(self, task: Task, world: int) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        mixed = task.compute == torch.bfloat16 and world == 1
        self.task = task
        self.module = Module(task, world, mixed)
        self.trainer = Trainer(
            accelerator="cpu",
            devices=world,
            strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1) if world > 1 else "auto",
            precision="bf16-mixed" if mixed else "32-true",
            max_epochs=1,
            accumulate_grad_batches=task.accumulation,
            gradient_clip_val=task.recipe.optim.clip_norm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def run(self, batches: Iterator[Tensors], steps: int) -> None:
        """Take all steps, and ask for one batch more, so that the iterator sees the end of the last step."""
        self.trainer.fit(self.module, Batches(batches, steps * self.task.accumulation + 1))
