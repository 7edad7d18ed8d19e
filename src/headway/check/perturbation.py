"""Seeded noise on every parameter: norms at 1, biases at 0 and gates at 0 hide wrong gradients."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headway.parallel import Piece
from headway.recipe import Recipe
from headway.train import Assembly, Ema

AMPLITUDE = 0.05


def piece_of(tensor: Tensor) -> Piece:
    """What this rank has of a tensor."""
    if not isinstance(tensor, DTensor):
        return Piece((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(tuple(offset), tuple(shape))


def noise(name: str, shape: torch.Size) -> Tensor:
    """float32, a function of name and shape alone. Matrices with many inputs get less, so that activations stay."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    inputs = drawn[0].numel() if drawn.ndim > 1 else 1
    return drawn * min(AMPLITUDE, 0.5 / inputs**0.5)


@torch.no_grad()
def perturb(parts: Assembly, recipe: Recipe) -> None:
    """Add ``noise`` to each parameter, trained or frozen, and let averages begin with the weights as they then are."""
    for name, whole in parts.masters.whole.items():
        parts.masters.local[name].add_(noise(name, whole.shape)[piece_of(whole).index()])
    compute = getattr(torch, recipe.precision.compute)
    for name, parameter in _parameters(parts):
        if parameter.requires_grad or not parameter.is_floating_point():
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        added = noise(name, parameter.shape)[piece_of(parameter).index()]
        # Rounded before and after: on one device frozen parameters are held in the compute dtype, elsewhere cast to it.
        local.copy_((local.to(compute).float() + added).to(compute))
    parts.layout.laid_out.masters_changed()
    parts.ema = Ema(parts.masters, parts.layout.laid_out, recipe.ema)


def _parameters(parts: Assembly) -> Iterator[tuple[str, nn.Parameter]]:
    """Of the model, or of this rank's stages of it."""
    staged = parts.layout.staged
    for module in [stage.module for stage in staged.split.stages] if staged else [parts.model]:
        yield from module.named_parameters()
