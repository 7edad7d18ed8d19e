"""Layouts as columns: how devices share a model, one array element a layout."""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cluster import Cluster
from headway.cost import Collective, Estimate, collective

Column = NDArray[np.float64]
DataParallel = Literal["ddp", "distributed_optimizer", "fsdp"]
"""ddp: all is held by each replica; distributed_optimizer: its states are shared (ZeRO-1); fsdp: parameters, gradients
and states are shared (ZeRO-3)."""


@dataclass(frozen=True)
class Layouts:
    """How devices share a model. Ranks of a tensor-parallel group are neighbours; context, data and pipeline follow.

    All fields are float columns of one length. Experts are shared by ``ep`` of the ``tp·cp·dp`` ranks of a stage, each
    expert's matrices by ``etp``.
    """

    devices: Column
    tp: Column
    sequence_parallel: Column
    """1 where activations between a block's products are split over the tensor-parallel ranks, else 0."""
    cp: Column
    pp: Column
    virtual: Column
    """Model chunks of a pipeline rank (interleaving)."""
    ep: Column
    etp: Column
    shards: Column
    """Data-parallel ranks that share parameters under fsdp (HSDP has fewer than dp · cp); 0: all."""
    micro_batch: Column
    global_batch: Column

    @property
    def dp(self) -> Column:
        """Replicas of the model."""
        return self.devices / (self.tp * self.cp * self.pp)

    @property
    def micro_batches(self) -> Column:
        """Micro-batches of a step that each device computes."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def sharing(self) -> Column:
        """Ranks among which gradients are reduced and states are shared."""
        return np.where(self.shards > 0, self.shards, self.dp * self.cp)

    @property
    def expert_sharing(self) -> Column:
        """As ``sharing``, for the parameters of experts."""
        return np.maximum(1, self.devices / (self.pp * self.ep * self.etp))

    def __len__(self) -> int:
        return len(self.devices)


def layouts(
    devices: ArrayLike,
    micro_batch: ArrayLike,
    global_batch: ArrayLike,
    *,
    tp: ArrayLike = 1,
    sequence_parallel: ArrayLike = 1,
    cp: ArrayLike = 1,
    pp: ArrayLike = 1,
    virtual: ArrayLike = 1,
    ep: ArrayLike = 1,
    etp: ArrayLike = 1,
    shards: ArrayLike = 0,
) -> Layouts:
    """Columns from numbers and arrays that broadcast. Raises ValueError where sizes do not divide the devices."""
    given = (devices, tp, sequence_parallel, cp, pp, virtual, ep, etp, shards, micro_batch, global_batch)
    columns = [np.atleast_1d(np.asarray(column, dtype=np.float64)) for column in given]
    found = Layouts(*(np.array(column) for column in np.broadcast_arrays(*columns)))
    wrong = (found.dp % 1 != 0) | (found.dp < 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        sizes = {column.name: getattr(found, column.name)[row] for column in fields(found)}
        raise ValueError(f"tp x cp x pp does not divide the devices: {sizes}")
    return found


def collective_in(
    cluster: Cluster, kind: Collective, size: ArrayLike, ranks: Column, stride: Column, sharing: float = 1.0
) -> Estimate:
    """Time of a collective of ``size`` bytes (a column) for each layout in its group of ``ranks``, ``stride`` apart."""
    given = np.broadcast_to(np.asarray(size, dtype=np.float64), ranks.shape)
    times = np.zeros((3, len(ranks)))
    pairs, which = np.unique(np.stack([ranks, stride]), axis=1, return_inverse=True)
    for number, (count, apart) in enumerate(pairs.T):
        chosen = which.ravel() == number
        group = cluster.group(round(count), max(1, round(apart)))
        found = collective(kind, given[chosen], group, sharing)
        times[:, chosen] = found.value, found.low, found.high
    return Estimate(times[0], times[1], times[2])
