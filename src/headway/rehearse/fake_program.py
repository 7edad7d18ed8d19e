"""Fake ranks and fake values: what stands in for a cluster while one process runs the program of one of its ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from headway.errors import UserError
from headway.rehearse.known_results import KnownResults
from headway.rehearse.recorder import Run
from headway.rehearse.whereabouts import Whereabouts
from headway.rehearse.work import tensors_in, traits

LARGEST_REAL = 1 << 20
"""Elements of an integer tensor that is still computed with; a mask of all pairs of tokens is not."""
_INTEGERS = frozenset({torch.int64, torch.int32, torch.bool})


@contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[None]:
    """The process is ``rank`` of ``world`` inside the context: collectives return at once, and nothing is sent."""
    if dist.is_initialized():
        raise RuntimeError("a rehearsal needs a process without a process group")
    _forget_meshes()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor keeps results by equal meshes, though their groups and this rank's place are others by now."""
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()


class FakeValues:
    """Tensors without values, but for small integers that follow from other real integers.

    The library's code reads lengths, borders of documents and grids of pictures out of integers: these stay real, as
    ``headway.train.flops`` has them. What follows from weights or activations has no value to be read.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor without values on the CPU, which stands for any device."""
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def placeholder(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``models.component.Placeholder``."""
        return self.empty(*shape, dtype=dtype)

    def run(self, where: Whereabouts) -> Run:
        """What computes an operator's result under a Recorder."""
        known = KnownResults(self.mode)

        def compute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if function is torch.ops._c10d_functional.wait_tensor.default:
                return args[0]  # as the real operator does; the fake one would make a new tensor
            if _stays_real(function, args, kwargs):
                with unset_fake_temporarily():
                    return function(*args, **kwargs)
            try:
                if traits(function).short == "_grouped_mm" and args[0].dtype == torch.float32:
                    return _grouped_product(function, args, kwargs)
                return known(function, args, kwargs)
            except DataDependentOutputException as error:
                module = where.now()[1] or "the model"
                raise UserError(
                    f"{module} looks at a value that a rehearsal does not have ({error.func}): its control "
                    "flow depends on data, so what a step does can't be told beforehand. Take that out of the "
                    "model's code, or measure a real run"
                ) from error

        return compute


def _grouped_product(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fake tensors alone refuse grouped products that are not bfloat16."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs))
    result: Tensor = function(*args, **kwargs)
    return result.float()


def _stays_real(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for argument in args:
        if type(argument) is FakeTensor:
            return False
    given = [*tensors_in(args), *tensors_in(kwargs)]
    if not given or traits(function).namespace != "aten":
        return False
    for tensor in given:
        if isinstance(tensor, FakeTensor) or tensor.dtype not in _INTEGERS or tensor.is_meta:
            return False
    wanted = kwargs.get("dtype")
    if wanted is not None and wanted not in _INTEGERS:
        return False
    if max(tensor.numel() for tensor in given) > LARGEST_REAL:
        return False
    try:
        return torch.broadcast_shapes(*(tensor.shape for tensor in given)).numel() <= LARGEST_REAL
    except RuntimeError:
        return True
