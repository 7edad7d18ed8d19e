"""Everything that is replaced in torch and in Headway while a step is recorded or rehearsed, and put back afterwards.

``recording`` is needed by any recorded run, ``rehearsing`` besides by one without real ranks and values. Read against
torch 2.11 to 2.13; tests/test_rehearse_records.py holds that all is put back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from headway.parallel import FullyShardedModel, Masters, expert_parallel
from headway.parallel.one_device import OneDevice
from headway.parallel.pipeline.stage_runner import StageRunner
from headway.rehearse.recorder import Recorder
from headway.rehearse.streams import Device
from headway.rehearse.whereabouts import Whereabouts
from headway.train import layout
from headway.train.ema import Ema
from headway.train.passes import PipelinedPasses, SequentialPasses

ASYNCHRONOUS = ("send", "recv", "allgather", "_allgather_base", "_reduce_scatter_base", "allreduce", "alltoall_base",
                "broadcast", "all_gather_single", "reduce_scatter_single")  # fmt: skip
"""Methods of a process group that return a Work."""
UPDATES = ((Ema, "update"), (Masters, "clip_gradients"), (FullyShardedModel, "masters_changed"),
           (OneDevice, "masters_changed"))  # fmt: skip
"""Methods whose work belongs to the optimizer's phase."""


class Replacements:
    """Attributes replaced, to be put back in reverse order."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def close(self) -> None:
        self._undo.close()

    def put(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name`` becomes ``value``; one that was inherited is inherited again afterwards."""
        own = vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.callback(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def before(self, owner: Any, name: str, told: Callable[..., None]) -> None:
        """``told(*arguments)`` is called before each call of ``owner.name``."""
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            told(*args, **kwargs)
            return function(*args, **kwargs)

        self.put(owner, name, wrapped)

    def around(self, owner: Any, name: str, context: Callable[..., Any]) -> None:
        """Calls of ``owner.name`` run within ``context(*arguments)``."""
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context(*args, **kwargs):
                return function(*args, **kwargs)

        self.put(owner, name, wrapped)


@contextmanager
def recorded_streams(device: Device) -> Iterator[None]:
    """FSDP2 takes ``device`` for the accelerator's module: from wrapping on, for it keeps what it is given."""
    replaced = Replacements()
    for module in (_fsdp_param_group, _fsdp_state, _fsdp_collectives):
        replaced.put(module, "_get_device_handle", lambda kind="": device)
    # FSDP2 asks this one at the end of a backward pass for a gather that nothing has waited for.
    replaced.put(torch.accelerator, "current_stream", device.current_stream)
    try:
        yield
    finally:
        replaced.close()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """The running program tells ``recorder`` its phases, micro-batches and waits."""
    replaced, where = Replacements(), recorder.where
    # DTensor tries each new operator at the global shape.
    replaced.around(ShardingPropagator, "_propagate_tensor_meta_non_cached", lambda *_, **__: recorder.silence())
    for owner, name in UPDATES:
        replaced.around(owner, name, lambda *_, **__: where.phase("optimizer"))
    for passes in (SequentialPasses, PipelinedPasses):
        replaced.around(passes, "gradients", lambda *_, **__: where.passes())
    for model in (FullyShardedModel, OneDevice):
        _count_micro_batches(replaced, model, recorder)
    replaced.around(
        _fsdp_param_group.FSDPParamGroup, "post_backward", lambda g, *_, **__: where.reducing(_modules_of(g))
    )
    _tell_actions(replaced, recorder)
    for name in ASYNCHRONOUS:
        _note_works(replaced, name, recorder)
    for work in (dist.Work, FakeWork):
        _note_waits(replaced, work, recorder)
    exchange = expert_parallel.exchange_sizes

    def exchange_read(sent: Tensor, received: Tensor, pairs: int) -> tuple[list[int], list[int]]:
        found = exchange(sent, received, pairs)
        recorder.host_reads_device("experts")
        return found

    replaced.put(expert_parallel, "exchange_sizes", exchange_read)
    handles = _tell_optimizer_steps(where)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        replaced.close()


def _modules_of(group: Any) -> list[nn.Module]:
    """What FSDP2 has wrapped, and then what has its first parameter: a whole model is better told by that."""
    return [group.modules[0], *(parameter._module_info.module for parameter in group.fsdp_params[:1])]


def _tell_optimizer_steps(where: Whereabouts) -> list[RemovableHandle]:
    phases = ExitStack()

    def begin(*_: Any) -> None:
        phases.enter_context(where.phase("optimizer"))

    def end(*_: Any) -> None:
        phases.close()

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]


def _count_micro_batches(replaced: Replacements, model: Any, recorder: Recorder) -> None:
    begin = model.begin_micro_batch

    def counted(self: Any, last: bool) -> None:
        recorder.where.micro_batch += 1
        begin(self, last)

    replaced.put(model, "begin_micro_batch", counted)


def _tell_actions(replaced: Replacements, recorder: Recorder) -> None:
    def forward(runner: Any, number: int, *_: Any, **__: Any) -> Any:
        return recorder.action("forward", runner.stage_index, number)

    def backward(runner: Any, number: int, *_: Any, full_backward: bool = True, **__: Any) -> Any:
        return recorder.action("backward" if full_backward else "backward_input", runner.stage_index, number)

    def weight(runner: Any, number: int, *_: Any, **__: Any) -> Any:
        return recorder.action("backward_weight", runner.stage_index, number)

    replaced.around(StageRunner, "forward_one_chunk", forward)
    replaced.around(StageRunner, "backward_one_chunk", backward)
    replaced.around(StageRunner, "backward_weight_one_chunk", weight)
    replaced.around(StageRunner, "perform_reduce_grad", lambda *_, **__: recorder.where.backward())


def _note_works(replaced: Replacements, name: str, recorder: Recorder) -> None:
    function = getattr(dist.ProcessGroup, name, None)
    if function is None:
        return

    def noted(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        recorder.work_returned(work)
        return work

    replaced.put(dist.ProcessGroup, name, noted)


def _note_waits(replaced: Replacements, work: Any, recorder: Recorder) -> None:
    wait = work.wait

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.waited_for(self)
        return wait(self, *args, **kwargs)

    replaced.put(work, "wait", noted)


class FewChunks:
    """Stands for the N chunks of a parameter, of which FSDP2 reads the first and its own: others are not made."""

    def __init__(self, tensor: Tensor, number: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = -(-tensor.size(dim) // number)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


@contextmanager
def without_ranks() -> Iterator[None]:
    """While a model is laid out and stepped without real ranks and values."""
    replaced = Replacements()
    replaced.put(_fsdp_param, "_chunk_with_empty", FewChunks)
    # A mesh's table of ranks must be real.
    replaced.around(DeviceMesh, "__init__", lambda *_, **__: unset_fake_temporarily())
    # Moving a module lets FSDP2 read its parameters again. They are where they should be, and fake ones can't move.
    replaced.put(nn.Module, "_apply", _visit_children)
    # The rehearsed device is no CPU: its products are not emulated.
    replaced.put(layout, "has_bfloat16_instructions", lambda: True)
    try:
        yield
    finally:
        replaced.close()


def _visit_children(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    for child in module.children():
        child._apply(function)
    return module


@contextmanager
def even_experts() -> Iterator[None]:
    """Tokens have no values that would choose experts: all experts get as many."""
    replaced = Replacements()

    def evenly(sent: Tensor, received: Tensor, pairs: int) -> tuple[list[int], list[int]]:
        torch.stack([sent.sum(1), received.sum(1)])  # what the host would read
        ranks = sent.shape[0]
        rows = [pairs // ranks + (place < pairs % ranks) for place in range(ranks)]
        return rows, rows

    replaced.put(expert_parallel, "exchange_sizes", evenly)
    try:
        yield
    finally:
        replaced.close()
