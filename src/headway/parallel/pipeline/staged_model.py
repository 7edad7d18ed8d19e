"""This rank's stages, laid out and filled, as what trains them sees them: one set of parameters."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headway.errors import RunFailed
from headway.parallel.masters import Masters
from headway.parallel.pipeline.shared import SharedParameters
from headway.parallel.pipeline.split import Split


class StagedModel:
    """The stages of one rank of the pipeline. ``group`` is of the pipeline's ranks, in the order of the plan."""

    def __init__(self, split: Split, group: dist.ProcessGroup) -> None:
        self.split = split
        self.group = group
        self._shared = SharedParameters(split, group)
        self._units = [m for stage in split.stages for m in stage.module.modules() if isinstance(m, FSDPModule)]
        self._parameters: dict[str, DTensor] = {}

    def parameters(self) -> dict[str, DTensor]:
        """What this rank trains, by the names of the whole model, in its order. The stages must have been filled.

        Copies of parameters that an earlier stage owns are not among them.
        """
        if not self._parameters:
            self.masters_changed()
            self._parameters = {
                name: parameter  # type: ignore[misc]
                for stage in self.split.stages
                for name, parameter in stage.module.named_parameters()
                if parameter.requires_grad and name not in self._shared.copies(stage.index)
            }
        return self._parameters

    def hand_over(self, masters: Masters) -> None:
        """Give the step's gradients to the masters' shards."""
        for parameter, shard in zip(self.parameters().values(), masters.local.values(), strict=True):
            gradient = parameter.grad
            shard.grad = None if gradient is None else gradient._local_tensor  # type: ignore[attr-defined]
            parameter.grad = None

    def masters_changed(self) -> None:
        """Let the stages compute with the parameters as they are now. All ranks of the pipeline must call it."""
        for unit in self._units:
            unit.reshard()
        self._shared.copy_values()

    def add_shared_gradients(self) -> None:
        """Complete the gradients of parameters that two stages use. All ranks of the pipeline must call it."""
        self._shared.add_gradients()

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of all stages."""
        for stage in self.split.stages:
            stage.module.train(mode)


def check_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Raises RunFailed when a parameter that is trained has no gradient after a backward pass, and so never trains."""
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    if without:
        raise RunFailed(
            f"{len(without)} of {len(parameters)} trained parameters got no gradient ({without[0]}, …): "
            "freeze what the model does not use (model.freeze), or use another layout.pp_schedule"
        )
