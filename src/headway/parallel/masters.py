"""What a rank trains: its own shards, as plain tensors for what steps on them, and as DTensors for what sees the whole.

Going through DTensor in every optimizer step costs two to three times the step itself on small models; updates, norms
and averages are element-wise or sums, so they work on the shards.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.parallel.placement import number_of_pieces


def clip_scale(norm: float, limit: float | None) -> float:
    """What gradients of ``norm`` are multiplied by so that their norm is at most ``limit``."""
    return limit / norm if limit is not None and norm > limit else 1.0


class Masters:
    """The trained parameters on this rank, by name, in the order of the model. Both forms share their memory."""

    def __init__(self, whole: Mapping[str, DTensor], model_ranks: int) -> None:
        """``model_ranks``: how many ranks hold a part or copy of these parameters (of one pipeline stage)."""
        self.whole = {name: _plain(parameter) for name, parameter in whole.items()}
        self.local = {name: nn.Parameter(parameter.to_local().detach()) for name, parameter in self.whole.items()}
        numbers = [number_of_pieces(parameter) for parameter in self.whole.values()]
        self._shares = torch.tensor([number / model_ranks for number in numbers], dtype=torch.float64)

    @torch.no_grad()
    def squared_norm_share(self) -> Tensor:
        """This rank's share of the squared gradient norm: a float64 scalar on the gradients' device.

        Summed over all ranks it is the square of the norm that a single device would compute: what r ranks hold alike
        counts 1/r on each of them.
        """
        trained = [number for number, shard in enumerate(self.local.values()) if shard.grad is not None]
        if not trained:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm(self.gradients(), 2, dtype=torch.float32)).double()
        shares = self._shares if len(trained) == len(self._shares) else self._shares[trained]
        return (norms.square() * shares.to(norms.device, non_blocking=True)).sum()

    @torch.no_grad()
    def clip_gradients(self, norm: float, limit: float | None) -> None:
        """Scale every gradient by ``limit / norm`` when ``norm`` (of the whole model) exceeds ``limit``."""
        scale = clip_scale(norm, limit)
        if scale != 1:
            torch._foreach_mul_(self.gradients(), scale)

    def gradients(self) -> list[Tensor]:
        """This rank's part of every gradient, without copies."""
        return [shard.grad for shard in self.local.values() if shard.grad is not None]

    def like(self, name: str, local: Tensor) -> DTensor:
        """``local``, one value for each element of this rank's shard, as a DTensor sharing its memory."""
        return _spread(local, self.whole[name])


def _spread(local: Tensor, like: DTensor) -> DTensor:
    # Shape and stride are the whole's: inferred from a shard they would be wrong wherever shards are uneven.
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _plain(parameter: DTensor) -> DTensor:
    """``parameter`` without the wrapper that lets FSDP2 gather it as float8; both share their memory."""
    local = parameter.to_local().detach()
    if not is_traceable_wrapper_subclass(local):
        return parameter
    (inner, *_), _ = local.__tensor_flatten__()
    return _spread(getattr(local, inner), parameter)
