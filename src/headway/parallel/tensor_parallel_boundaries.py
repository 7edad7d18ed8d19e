"""Where tensor parallelism meets: whole, partial and token-split activations, and the hooks that turn one into another.

All of them are ordinary tensors of (batch, tokens, channels) on each rank. A boundary is a collective whose transpose
happens in backward; nothing else of tensor parallelism communicates.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from headway.errors import UserError

Boundary = Callable[[Tensor, DeviceMesh], Tensor]
TOKENS = 1
"""The dimension of tokens."""


def shared(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """A whole tensor of which each rank computes a part of what follows. Backward: all-reduce."""
    return _placed(whole, mesh, Replicate()).to_local(grad_placements=[Partial()])


def summed(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks, on every rank: all-reduce. Backward: nothing."""
    return _placed(part, mesh, Partial()).redistribute(placements=[Replicate()]).to_local()


def gathered(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """All tokens from each rank's, of which each rank computes a part of what follows. Backward: reduce-scatter."""
    whole = _placed(tokens, mesh, Shard(TOKENS)).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def scattered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of the sum over ranks: reduce-scatter. Backward: all-gather."""
    return _placed(part, mesh, Partial()).redistribute(placements=[Shard(TOKENS)]).to_local()


def split(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of a tensor that all ranks hold alike. Backward: all-gather.

    Raises UserError when the number of tokens is not a multiple of the number of ranks.
    """
    if whole.shape[TOKENS] % mesh.size():
        raise UserError(
            f"layout.sequence_parallel: {whole.shape[TOKENS]} tokens can't be split over layout.tp = {mesh.size()}: "
            "make the length of sequences a multiple of it, or set layout.sequence_parallel = false"
        )
    return _placed(whole, mesh, Replicate()).redistribute(placements=[Shard(TOKENS)]).to_local()


def joined(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """All tokens from each rank's, for what all ranks compute alike: all-gather. Backward: this rank's tokens."""
    return _placed(tokens, mesh, Shard(TOKENS)).redistribute(placements=[Replicate()]).to_local()


def _placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def before(module: nn.Module, boundary: Boundary, mesh: DeviceMesh, others: tuple[str, ...] = ()) -> None:
    """Put ``boundary`` before ``module``: at its first argument, and at those named in ``others``."""
    names = list(inspect.signature(module.forward).parameters)
    places = tuple((name, names.index(name)) for name in (names[0], *others) if name in names)
    hook = functools.partial(_enter, boundary=boundary, places=places, mesh=mesh)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _enter(
    module: Any, args: Any, kwargs: Any, *, boundary: Boundary, places: tuple[tuple[str, int], ...], mesh: DeviceMesh
) -> tuple[Any, Any]:
    positional, named = list(args), dict(kwargs)
    for name, place in places:
        if place < len(positional) and positional[place] is not None:
            positional[place] = boundary(positional[place], mesh)
        elif named.get(name) is not None:
            named[name] = boundary(named[name], mesh)
    return tuple(positional), named


def after(module: nn.Module, boundary: Boundary, mesh: DeviceMesh) -> None:
    """Put ``boundary`` after ``module``: at its output, or the first of several."""
    module.register_forward_hook(functools.partial(_exit, boundary=boundary, mesh=mesh))


def _exit(module: Any, args: Any, output: Any, *, boundary: Boundary, mesh: DeviceMesh) -> Any:
    if isinstance(output, tuple):
        return boundary(output[0], mesh), *output[1:]
    return boundary(output, mesh)
