"""What stands in a stage's copy of the model for the modules of other stages, so that the library's own forward runs.

Names and indices of modules never move, and stand-ins hold no parameters. A stage's forward begins like that of the
whole model, with the same inputs. What the modules of earlier stages would compute is given back by their stand-ins;
the first block that is not the stage's own ends the forward by an exception that carries the tensors which travel on.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Done(Exception):  # noqa: N818 - no error: the stage has computed its part
    """Ends a stage's forward; ``tensors`` are what the next stage needs, in the order in which they travel."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("the stage's last block is done")
        self.tensors = tensors


class Passage:
    """What came into a stage for one micro-batch, while its forward runs. Nothing of it is left for the backward."""

    def __init__(self) -> None:
        self.received: Mapping[str, Tensor] = {}
        """By name, from the stage before."""
        self.noted: dict[str, Tensor] = {}
        """Results of this stage's own modules that later stages need although no block takes them."""

    def begin(self, received: Mapping[str, Tensor]) -> None:
        """Before each forward."""
        self.received = received
        self.noted = {}

    def end(self) -> None:
        """After each forward: no tensor is kept alive."""
        self.begin({})


class StandIn(nn.Module):
    """Stands for a module that is on another stage. It has neither parameters nor buffers."""


class Received(StandIn):
    """Returns what the named module of an earlier stage returned: one tensor, or a tuple (None where nothing came)."""

    def __init__(self, passage: Passage, names: tuple[str | None, ...]) -> None:
        super().__init__()
        self._passage = passage
        self._names = names

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What was received, whatever the arguments."""
        values = tuple(None if name is None else self._passage.received[name] for name in self._names)
        return values[0] if len(values) == 1 else values


class Blank(StandIn):
    """Stands for a token embedding: zeros of its shape, which take no memory.

    The model reads the sequence's length, the dtype and the device off them; the blocks get what was received, whose
    length differs where sequences are split over ranks.
    """

    def __init__(self, passage: Passage, like: str) -> None:
        super().__init__()
        self._passage = passage
        self._like = like

    def forward(self, tokens: Tensor) -> Tensor:
        """(…, L) int64 -> (…, L, H)."""
        like = self._passage.received[self._like]
        return like.new_zeros(()).expand(*tokens.shape, like.shape[-1])


class Skipped(StandIn):
    """Returns its first argument: for a module whose result is not used on this stage, or that is never reached."""

    def forward(self, first: Any, *arguments: Any, **keywords: Any) -> Any:
        """``first``, as it is."""
        return first


class Leave(StandIn):
    """Stands for a block behind the stage's own ones: raises Done with what that block was given."""

    def __init__(self, passage: Passage, travels: tuple[str, ...], block: nn.Module) -> None:
        super().__init__()
        self._passage = passage
        self._travels = travels
        self._signature = inspect.signature(block.forward)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Raises Done."""
        given = self._signature.bind(*arguments, **keywords).arguments
        known = {**self._passage.received, **self._passage.noted, **given}
        raise Done(tuple(known[name] for name in self._travels))


def note_results(module: nn.Module, passage: Passage, names: tuple[str | None, ...]) -> None:
    """Let ``passage`` note the members of the tuple that ``module`` returns, by ``names``; None: not that one."""

    def note(module: nn.Module, arguments: Any, result: Any) -> None:
        for name, value in zip(names, result, strict=True):
            if name is not None:
                passage.noted[name] = value

    module.register_forward_hook(note)


def own_memory(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of it where it can't be sent or detached in place: views, strided ones, graph leaves."""
    if tensor._is_view() or not tensor.is_contiguous() or (tensor.is_leaf and tensor.requires_grad):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor
