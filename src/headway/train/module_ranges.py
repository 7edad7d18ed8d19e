"""Ranges in a profiler's trace that say which module runs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from headway.data import Batch
from headway.timeline import MODULE_RANGE, PASSES_RANGE
from headway.train.assembly import StepParts
from headway.train.passes import Passes


class ModuleRanges:
    """A range around each forward pass of each module, named by its path, while they are attached.

    Repeated forward passes of activation checkpointing have them too. What is inside a ``compiled`` block has none: its
    hooks would be compiled with it, and compile it anew. Backward passes are told by the numbers of autograd's nodes.
    """

    def __init__(self, parts: StepParts, *, compiled: bool) -> None:
        inside = {
            id(module)
            for _, block in parts.built.blocks
            for module in block.modules()
            if compiled and module is not block
        }
        self._modules = [(path, module) for path, module in _named_modules(parts) if path and id(module) not in inside]
        self._hooks: list[RemovableHandle] = []
        self._parts, self._passes = parts, parts.passes

    def attach(self) -> None:
        """Have ranges from now on."""
        for path, module in self._modules:
            enter, leave = _hooks(MODULE_RANGE + path)
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        self._parts.passes = _PassesInRange(self._passes)

    def detach(self) -> None:
        """Have no ranges from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._parts.passes = self._passes


class _PassesInRange:
    """``passes``, those with gradients in a range of their own."""

    def __init__(self, passes: Passes) -> None:
        self.losses, self.output = passes.losses, passes.output
        self._gradients = passes.gradients

    def gradients(self, batches: list[Batch], scale: Tensor) -> list[Tensor]:
        """See Passes."""
        with record_function(PASSES_RANGE):
            return self._gradients(batches, scale)


def _named_modules(parts: StepParts) -> list[tuple[str, nn.Module]]:
    """Trained modules of this rank and frozen ones by the paths that a rehearsal gives them too."""
    staged = parts.layout.staged
    trained = [parts.built.module] if staged is None else [stage.module for stage in staged.split.stages]
    found = [pair for model in trained for pair in model.named_modules()]
    frozen = parts.built.frozen
    if frozen is not None:
        others = dict(frozen.encoders) | ({"vae": frozen.vae} if frozen.vae is not None else {})
        found += [pair for name, other in others.items() for pair in other.module.named_modules(prefix=name)]
    return found


def _hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """What opens a range called ``name``, and what closes the one that was opened last."""
    opened: list[record_function] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        opened.append(record_function(name))
        opened[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        if opened:  # a pass that had begun before this was attached has none
            opened.pop().__exit__(None, None, None)

    return enter, leave
