"""A small model with uneven shards, sharded the way every model of a run is."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from headway.parallel import FullyShardedModel, Masters


def uneven_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """First dimensions 5, 7 and 2: uneven on two and three ranks, and fewer rows than three ranks need."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).to(dtype)


def shard(model: nn.Sequential, replicate: int = 1) -> nn.Sequential:
    """Shard ``model`` over the ranks, or (replicate > 1) over each replica's ranks."""
    world = dist.get_world_size()
    if replicate == 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    else:
        mesh = init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("dp_replicate", "dp_shard"))
    for layer in model[:-1]:  # the last one is the root's own: FSDP2 keeps it gathered after a forward pass
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def masters_of(model: nn.Module) -> Masters:
    """What trains a model of ``shard``."""
    return Masters(FullyShardedModel(model).parameters(), dist.get_world_size())


def set_gradients(trained: nn.Module | Masters, step: int) -> None:
    """The same gradient for each parameter on every layout, sharded where the parameter is."""
    generator = torch.Generator().manual_seed(1000 + step)
    if isinstance(trained, Masters):
        for name, shard in trained.local.items():
            parameter = trained.whole[name]
            whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            spread = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            shard.grad = spread.to_local()
    else:
        for parameter in trained.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors on every rank."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
