"""Tensor parallelism, with sequence parallelism for decoders: weights divided within layers over the ranks of one axis.

A layer costs two all-reduces of its activations forward and two backward; with sequence parallelism an all-gather and a
reduce-scatter in place of each, the same bytes, and what stands between attention and feed-forward is computed and kept
for a rank's own tokens only.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from headway.errors import UserError
from headway.parallel.tensor_parallel_plans import Step, steps_of
from headway.parallel.tensor_parallel_styles import Division


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide ``module`` in place over the one-dimensional ``mesh``, before it is sharded.

    ``module`` is a denoiser of diffusers (Flux, SD3, Wan, PixArt, Sana) or a language or vision-language model of
    transformers with a plan; on meta, or filled alike on all ranks. Names of parameters stay. Divided parameters become
    DTensors on ``mesh``; the others stay ordinary, alike on all ranks, with complete gradients. Gradients of some
    DTensors are sums still to be made (Partial), which fully_shard completes, once a step.

    ``sequence`` splits what is between the divided parts of a decoder over tokens; denoisers are divided without it.
    Logits of language models become a DTensor divided over the vocabulary when ``mesh`` divides it: see
    ``cross_entropy_sum``. Raises UserError as ``check_tensor_parallel`` does.
    """
    if mesh.size() == 1:
        return
    check_tensor_parallel(module, mesh.size())
    division = Division(mesh)
    for step in steps_of(module, sequence):
        step.style.apply(step.module, division)


def check_tensor_parallel(module: nn.Module, size: int) -> None:
    """Raises UserError when ``module`` (on meta or not) can't be divided over ``size`` ranks: why, and what can."""
    steps = steps_of(module, sequence=False)
    reason = _obstacle(steps, size)
    if reason is not None:
        nearest = [n for n in range(1, 2 * size + 1) if _obstacle(steps, n) is None]
        raise UserError(f"layout.tp = {size}: {reason}; it can be {_listed(nearest, size)}")


def _obstacle(steps: list[Step], size: int) -> str | None:
    """The first thing in the way of a division by ``size``."""
    for path, module, style in steps:
        if (reason := style.obstacle(module, size)) is not None:
            return f"{reason} ({path})"
    return None


def _listed(sizes: list[int], size: int) -> str:
    """The nearest below and, if there is one, above."""
    below, above = [n for n in sizes if n < size], [n for n in sizes if n > size]
    return " or ".join(str(n) for n in below[-1:] + above[:1])
