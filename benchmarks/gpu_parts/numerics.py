"""Every kernel of the catalogue on the device, held to what it is held to on the interpreter.

The proof of an operator calls the launches of its module ``NAME_triton`` with CPU tensors. Here these are called with
copies on the device, strides and all, and what they return and change comes back.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headway.kernels import OPERATORS

SEEDS = (0, 1)


class OnDevice:
    """A module of launches, whose functions take and give CPU tensors and compute on ``device``."""

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module = module
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return self._moving(found) if callable(found) else found

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            moved: list[tuple[Tensor, Tensor]] = []

            def there(tensor: Tensor) -> Tensor:
                moved.append((tensor, _copied(tensor, self._device)))
                return moved[-1][1]

            arguments, keywords = tree_map_only(Tensor, there, (arguments, keywords))
            result = function(*arguments, **keywords)
            for here, copy in moved:
                if _changed(here, copy):
                    here.copy_(copy)
            return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)

        return call


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """On ``device``, at the same place of as large a memory."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _changed(here: Tensor, copy: Tensor) -> bool:
    before, after = (tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (here, copy))
    return not torch.equal(before, after)


def run(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None]) -> None:
    """A row for each result of each case."""
    for name, operator in OPERATORS.items():
        proof = import_module(operator.proof)
        for case, seed in _cases(proof, dry):
            with _placed(proof, device):
                try:
                    verdicts = proof.check(case, seed)
                except Exception as error:  # one kernel that does not run must not hide the others
                    add({"operator": name, "case": str(case), "passed": False, "error": f"{error}"[:300]})
                    continue
            for verdict in verdicts:
                add(
                    {
                        "operator": name,
                        "case": str(case),
                        "seed": seed,
                        "result": verdict.name,
                        "error": verdict.error,
                        "eager_error": verdict.eager_error,
                        "passed": verdict.passed,
                    }
                )


def _cases(proof: Any, dry: bool) -> Iterator[tuple[Any, int]]:
    for case in proof.CASES[:1] if dry else proof.CASES:
        for seed in SEEDS[:1] if dry else SEEDS:
            yield case, seed


def _placed(proof: ModuleType, device: torch.device) -> Any:
    """On a GPU the launches of the proof go there; on a CPU the interpreter stays."""
    if device.type == "cpu":
        return nullcontext()
    launches = {
        name: OnDevice(value, device)
        for name, value in vars(proof).items()
        if isinstance(value, ModuleType) and name.endswith("_triton")
    }
    return patch.multiple(proof, interpreted=lambda *_, **__: nullcontext(), **launches)
