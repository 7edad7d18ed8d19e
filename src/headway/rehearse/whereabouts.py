"""Where the running program is: phase, module, repeated block, micro-batch and stage of what is issued now."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headway.rehearse.record import Phase


class Whereabouts:
    """Follows forward hooks of all modules, and autograd's numbers of the nodes that they make.

    A backward operator belongs to the module in whose forward its node was made: nodes are numbered in the order in
    which they are made, so it is enough to know the number at which each module was entered and left.
    """

    def __init__(self, models: list[nn.Module], blocks: list[str], others: dict[str, nn.Module]) -> None:
        """``models``: with one set of names; ``blocks``: paths of repeated ones; ``others``: frozen modules."""
        self._paths = {id(module): path for model in models for path, module in model.named_modules()}
        for name, other in others.items():
            self._paths |= {id(module): ".".join(filter(None, (name, path))) for path, module in other.named_modules()}
        self._block_of: dict[str, str] = {}
        self._blocks = set(blocks)
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._owners: list[str] = []
        self._last = ""
        self.override: Phase | None = "other"
        """The phase outside of the passes; None inside them."""
        self.micro_batch = -1
        self.stage = 0
        self._in_backward = False
        self._reduced = ""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the modules that run inside the context."""
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._note_nodes()
        path = self._paths.get(id(module))
        self._stack.append(path if path is not None else self._stack[-1] if self._stack else "")

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        self._note_nodes()
        if self._stack:
            self._stack.pop()

    def _note_nodes(self) -> None:
        """Nodes made since the last call belong to the module that is running."""
        number = torch._C._autograd._get_sequence_nr()
        owner = self._stack[-1] if self._stack else ""
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._owners.append(owner)

    def _owner(self, number: int) -> str | None:
        """The module that was running when node ``number`` was made."""
        place = bisect_right(self._numbers, number)
        return self._owners[place] if place < len(self._owners) else None

    def now(self) -> tuple[Phase, str]:
        """Phase and module of what is issued now."""
        in_backward = torch._C._current_graph_task_id() != -1 or self._in_backward
        # With gradients, but neither in a module nor for a node, is what a stage's backward pass begins with.
        at_work = bool(self._stack) or torch._C._current_autograd_node() is not None
        if in_backward and not (torch.is_grad_enabled() and at_work):
            self._last = self._stack[-1] if self._stack else self._reduced or self._of_node()
            return "backward", self._last
        if in_backward:
            # What runs with gradients is recomputed; directly in a checkpointed block no module's forward is entered.
            self._last = self._stack[-1] if self._stack else self.block(self._of_node())
            return "recompute", self._last
        if self._stack:
            self._last = self._stack[-1]
            return self.override or "forward", self._last
        self._last = ""
        return self.override or "forward", ""

    def _of_node(self) -> str:
        """The module of the autograd node at work; FSDP2's own work and accumulation belong to what was before."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last
        self._note_nodes()
        owner = self._owner(node._sequence_nr())
        return self._last if owner is None else owner

    def begin_action(self) -> None:
        """What is issued next is of no module that was at work before."""
        self._last = ""

    def block(self, module: str) -> str:
        """The repeated block that ``module`` is in, or ``""``."""
        if module not in self._block_of:
            path = module
            while path and path not in self._blocks:
                path = path.rpartition(".")[0]
            self._block_of[module] = path
        return self._block_of[module]

    @contextmanager
    def phase(self, phase: Phase | None) -> Iterator[None]:
        """What runs inside, outside of modules and backward passes, is of ``phase``; None: of a forward pass."""
        before, self.override = self.override, phase
        try:
            yield
        finally:
            self.override = before

    @contextmanager
    def passes(self) -> Iterator[None]:
        """The micro-batches of a step pass through the model."""
        with self.phase(None):
            yield
        self.micro_batch = -1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """What runs inside belongs to a backward pass, though not all of it runs within autograd."""
        before, self._in_backward = self._in_backward, True
        try:
            yield
        finally:
            self._in_backward = before

    @contextmanager
    def reducing(self, modules: list[nn.Module]) -> Iterator[None]:
        """FSDP2 reduces gradients of the first of ``modules`` that has a path: in a pipeline, when no backward pass
        runs."""
        paths = (self._paths.get(id(module), "") for module in modules)
        before, self._reduced = self._reduced, next(filter(None, paths), "")
        try:
            yield
        finally:
            self._reduced = before
