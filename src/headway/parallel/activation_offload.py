"""What fully checkpointed blocks keep, their inputs, in host memory until their backward pass."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu


def offload_activations(blocks: Iterable[nn.Module], pin_memory: bool) -> None:
    """Keep each block's saved tensors in host memory. To be called after ``checkpoint_activations`` with ``full``.

    Without full checkpointing gathered parameters would be among the saved tensors, and be copied as well. Page-locked
    memory (``pin_memory``, on CUDA) lets the copies run beside the computation.
    """
    for block in blocks:
        block.forward = _offloading(block.forward, pin_memory)


def _offloading(forward: Any, pin_memory: bool) -> Any:
    @functools.wraps(forward)
    def offloading_forward(*arguments: Any, **keywords: Any) -> Any:
        with save_on_cpu(pin_memory=pin_memory):
            return forward(*arguments, **keywords)

    return offloading_forward
