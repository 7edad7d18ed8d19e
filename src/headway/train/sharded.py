"""Parameters as the shards that each rank holds."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headway.parallel import held_whole


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass (the root's: until the next backward pass).

    Without this a forward pass after a change of the shards would still see the old values, and ``named_parameters``
    would hand out the gathered copies.
    """
    held = held_whole(model)
    if held is not None:
        held.expect_change()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trainable_parameters(model: nn.Module) -> dict[str, DTensor]:
    """The parameters that are trained, by name. All of ``model`` must have been laid out."""
    reshard(model)
    held = held_whole(model)
    if held is not None:
        return held.masters()  # type: ignore[return-value]
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}  # type: ignore[misc]


def sharded_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """``local``, one value for each element of this rank's shard of ``parameter``, as a DTensor sharing its memory.

    Shape and stride are the parameter's: inferred from a shard they would be wrong wherever shards are uneven.
    """
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
