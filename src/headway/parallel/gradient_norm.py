"""The gradient norm of the whole model, each parameter counted once in any mix of meshes and placements."""

import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of every gradient, without copies."""
    return [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in parameters
        if parameter.grad is not None
    ]


def squared_norm_share(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the squared gradient norm: a float64 scalar on the gradients' device.

    Summed over all ranks it is the square of the norm that a single device would compute: what r ranks hold alike
    counts 1/r on each of them. Gradients must not be Partial (fully_shard leaves none).
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    if not held:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(local_gradients(held), 2, dtype=torch.float32)).double()
    shares = torch.tensor([1.0 / _holders(parameter) for parameter in held], dtype=torch.float64)
    return (norms.square() * shares.to(norms.device, non_blocking=True)).sum()


def _holders(parameter: torch.Tensor) -> int:
    """How many ranks hold the same part of this gradient."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return torch.distributed.get_world_size()
    return math.prod(
        gradient.device_mesh.size(dimension)
        for dimension, placement in enumerate(gradient.placements)
        if placement.is_replicate()
    )


def clip_gradients(parameters: Iterable[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale every gradient by ``limit / norm`` when ``norm`` (of the whole model) exceeds ``limit``."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(local_gradients(parameters), limit / norm)
