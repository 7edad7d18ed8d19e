"""Which record stands at which global position: a function of the seed alone."""

from collections import OrderedDict

import numpy as np

from headway.data.randomness import permutation

_EPOCHS_KEPT = 2


class SampleOrder:
    """Positions 0, 1, … run through all ``size`` records once an epoch, in the epoch's own order if ``shuffle``."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        if size < 1:
            raise ValueError("an order needs at least one record")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()

    def record(self, position: int) -> tuple[int, int]:
        """(epoch, record index) at a global position."""
        epoch, place = divmod(position, self.size)
        return epoch, int(self._order(epoch)[place]) if self.shuffle else place

    def _order(self, epoch: int) -> np.ndarray:
        """int64 (size,). Two epochs are kept, as a batch may hold the end of one and the beginning of the next."""
        if epoch not in self._orders:
            self._orders[epoch] = permutation(self.size, seed=self.seed, stream="order", step=epoch)
            while len(self._orders) > _EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[epoch]
