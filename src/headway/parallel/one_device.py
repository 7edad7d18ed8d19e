"""One device: the model whole, without the hooks that sharding puts around every block.

``fully_shard`` over a single rank computes the same numbers, but it copies every parameter twice in each micro-batch
and runs Python around each of them: a step of a small model then takes 25 to 40 % longer on a CPU (``raw_fully_shard``
in benchmarks/trainer_overhead.py). Here the model computes with ordinary parameters in the compute dtype, and what
trains it gets DTensors on the mesh of one rank, with the names, dtypes and gradients that ``fully_shard`` would give.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from headway.parallel.masters import Masters


class OneDevice:
    """The master weights of a model on one rank, and the parameters in the compute dtype that the model uses.

    The model may still be on meta when it is laid out: it is taken over with the first call of ``parameters``.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, compute: torch.dtype, reduce: torch.dtype) -> None:
        self._model = model
        self._mesh = mesh
        self._compute = compute
        self._reduce = reduce
        self._masters: dict[str, DTensor] = {}
        self._used: list[Tensor] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._sums: list[Tensor | None] = []

    def train(self, mode: bool) -> None:
        """See LaidOut."""
        self._model.train(mode)

    def parameters(self) -> dict[str, DTensor]:
        """The trainable parameters by name: DTensors in the master dtype. The model must have been filled."""
        if not self._masters:
            self._take_over()
        return self._masters

    def _take_over(self) -> None:
        for name, parameter in self._model.named_parameters():
            master = parameter.detach()
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self._compute)  # in the same dtype: one memory for both
            if parameter.requires_grad:
                self._masters[name] = DTensor.from_local(master, self._mesh, [Shard(0)], run_check=False)
                self._used.append(parameter)
                if master.dtype != self._compute:
                    self._copied.append((parameter, master))
        self._sums = [None] * len(self._used)

    def begin_micro_batch(self, last: bool) -> None:
        """See LaidOutWhole: one rank has nothing to reduce."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, a scalar, in the reduce dtype."""
        loss.backward()
        if self._reduce != self._compute:  # else autograd adds them up where they are
            self._add_up()

    @torch.no_grad()
    def _add_up(self) -> None:
        sums, added = [], []
        for index, used in enumerate(self._used):
            total, gradient = self._sums[index], used.grad
            if gradient is None:
                continue
            if total is None:
                self._sums[index] = gradient.to(self._reduce)
            else:
                sums.append(total)
                added.append(gradient)
            used.grad = None
        if added:
            torch._foreach_add_(sums, added)

    def hand_over(self, masters: Masters) -> None:
        """Give the step's gradients to the masters' shards, in their dtype."""
        for index, (used, shard) in enumerate(zip(self._used, masters.local.values(), strict=True)):
            total = used.grad if self._reduce == self._compute else self._sums[index]
            shard.grad = None if total is None else total.to(shard.dtype)
            used.grad = None
            self._sums[index] = None

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Let the model compute with the masters as they are now."""
        if self._copied:
            torch._foreach_copy_([used for used, _ in self._copied], [master for _, master in self._copied])
