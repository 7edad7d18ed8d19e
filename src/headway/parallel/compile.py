"""torch.compile of each repeated block."""

from collections.abc import Iterable

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block's forward, inside the hooks that sharding adds later.

    Equal blocks share one compilation, since the code and guards are the same. Names stay: no wrapper is added.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward)
