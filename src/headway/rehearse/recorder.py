"""Writes down what a rank does in a step: every kernel, collective, allocation and wait, as they are issued.

A dispatch mode sees operators below autograd, as an accelerator's queue would. It works in any run on the CPU: on fake
tensors and fake ranks (a rehearsal), and on real ones over gloo, to which a rehearsal can so be compared.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.rehearse.collectives import Groups, kind_of
from headway.rehearse.record import (
    Access,
    Allocation,
    Category,
    Collective,
    HostRead,
    Operator,
    OperatorKind,
    Phase,
    Segment,
    StageAction,
)
from headway.rehearse.storages import Storages
from headway.rehearse.streams import Device, Stream
from headway.rehearse.whereabouts import Whereabouts
from headway.rehearse.work import READ_IN_PART, OperatorTraits, bytes_of, dtype_of, tensors_in, traits, work_of
from headway.train.flops import FORMULAS

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes an operator's result."""


MARK = "mark"
"""Name of an operator that does nothing."""
_DEVICE = torch.ops.prim.device.default


def _plainly(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class Recorder(TorchDispatchMode):
    """Records what runs while it is entered. ``patches.recording`` must surround it."""

    def __init__(self, where: Whereabouts, device: Device, groups: Groups, run: Run = _plainly) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.groups = groups
        self.operators: list[Operator] = []
        self.host_reads: list[HostRead] = []
        self.actions: list[StageAction] = []
        self.segments: list[Segment] = []
        self.storages = Storages(lambda: len(self.operators), self._here)
        self._device = device
        self._run = run
        self._silent = 0
        self._arriving: dict[int, int] = {}
        self._works: dict[int, tuple[Any, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while it is entered: calls need not be kept from the compiler one by one."""
        return False

    def __enter__(self) -> "Recorder":
        self._entered = ExitStack()
        self._entered.enter_context(self.storages.watching())
        self._entered.enter_context(self.where.following())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._entered.close()

    def allocations(self) -> list[Allocation]:
        """To be called once, when all is recorded."""
        return self.storages.allocations(self.operators)

    # --- what others tell

    @contextmanager
    def silence(self) -> Iterator[None]:
        """What runs inside is no part of the program."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    @contextmanager
    def action(self, kind: Any, stage: int, micro_batch: int) -> Iterator[None]:
        """A pass of a micro-batch through a stage."""
        where, first = self.where, len(self.operators)
        before = where.stage, where.micro_batch
        where.stage, where.micro_batch = stage, micro_batch
        where.begin_action()
        with where.phase(None), where.backward() if kind != "forward" else ExitStack():
            yield
        where.stage, where.micro_batch = before
        self.actions.append(StageAction(kind, stage, micro_batch, first, len(self.operators)))

    @contextmanager
    def segment(self, kind: str, stage: int, micro_batch: int, takes: Iterable[Tensor] = ()) -> Iterator[list[Tensor]]:
        """A part that may be repeated; what it hands back is to be put into the list."""
        given = tuple(self.storages.serial(tensor) for tensor in takes)
        first, (_, first_event) = len(self.operators), self.storages.moment()
        gives: list[Tensor] = []
        yield gives
        _, stop_event = self.storages.moment()
        back = tuple(self.storages.serial(tensor) for tensor in gives)
        gives.clear()
        end = (first, len(self.operators), first_event, stop_event)
        self.segments.append(Segment(kind, stage, micro_batch, *end, given, back))

    def add_segment(
        self,
        kind: str,
        stage: int,
        micro_batch: int,
        first: int,
        stop: int,
        first_event: int,
        stop_event: int,
        gives: tuple[int, ...],
    ) -> None:
        """One whose ends and what it hands back are told afterwards."""
        self.segments.append(Segment(kind, stage, micro_batch, first, stop, first_event, stop_event, (), gives))

    def mark(self) -> None:
        """Put an operator that does nothing on the current stream: it stands for all that the stream waits for now."""
        where: tuple[Phase, int] = ("forward", -1)
        if self.operators:  # what it stands beside is still of what was before it
            where = self.operators[-1].phase, self.operators[-1].micro_batch
        number, stream = len(self.operators), self._device.stream_now
        self.operators.append(
            Operator(
                MARK, "pointwise", stream.name, tuple(sorted(stream.after())), where[0], "", "", where[1],
                self.where.stage, 0, (), (), "", False,
            )
        )  # fmt: skip
        stream.issued(number)

    def host_reads_device(self, reason: str) -> None:
        """The host waits for all that was issued on the current stream."""
        after = tuple(sorted(self._device.stream_now.after()))
        self.host_reads.append(HostRead(len(self.operators), after, reason))

    def work_returned(self, work: Any) -> None:
        """``work`` stands for the asynchronous collective that was issued last."""
        if work is not None and self.operators and not self._silent:
            self._works[id(work)] = work, len(self.operators) - 1

    def waited_for(self, work: Any) -> None:
        """The current stream waits for the collective of ``work``."""
        known = self._works.pop(id(work), None)
        if known is not None:
            self._device.stream_now.wait_for({known[1]})

    def name(self, named: Iterable[tuple[str, Tensor]], category: Category) -> None:
        """Say what tensors are held for."""
        for name, tensor in named:
            self.storages.name(tensor, category, name)

    @property
    def stream_now(self) -> Stream:
        """The lane on which operators are issued."""
        return self._device.stream_now

    # --- what the dispatcher tells

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked more often than all else
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # it becomes operators on plain tensors first
        kwargs = kwargs or {}
        known = traits(func)
        if known.is_asked:
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs)
        if not self._silent:
            self._record(func, known, args, kwargs, result)
        return result

    def _record(
        self, function: Any, known: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if not known.is_kernel:
            if known.short == "_local_scalar_dense":
                self.host_reads_device(self.where.now()[1])
            elif known.allocates:
                self.storages.see(result)
        elif known.short == "wait_tensor":
            self._await(args[0])
        else:
            kind = kind_of(known.namespace, known.short)
            collective = None
            if kind is not None:
                collective = self.groups.collective(function, kind, args, kwargs, result)
            self._name_buffers(known, args, kwargs)
            self._issue(function, known, args, kwargs, result, collective)

    def _issue(
        self,
        function: Any,
        known: OperatorTraits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        collective: Collective | None,
    ) -> None:
        made = list(tensors_in(result))
        read, changed = _read_and_changed(known, args, kwargs, made)
        written = changed or made
        phase, module = self.where.now()
        module = module or self._owner(phase, read, made)
        lane = self._lane(collective)
        formula = FORMULAS.get(function._overloadpacket)
        number = len(self.operators)
        reads = self._once(read)
        writes = self._once([(tensor, bytes_of(tensor)) for tensor in written])
        self.operators.append(
            Operator(
                name=known.name,
                kind=_charged_as(known, collective, phase),
                lane=lane.name,
                after=tuple(sorted(lane.after())),
                phase=phase,
                module=module,
                block=self.where.block(module),
                micro_batch=self.where.micro_batch,
                stage=self.where.stage,
                flops=formula(*args, **kwargs, out_val=result) if formula is not None else 0,
                reads=reads,
                writes=writes,
                dtype=dtype_of(written[0]) if written else "",
                fusible=known.fusible,
                work=work_of(known.short, args, kwargs, result),
                collective=collective,
            )
        )
        lane.issued(number)
        if collective is not None and known.namespace == "_c10d_functional":
            self._arriving |= {access.storage: number for access in writes}

    def _once(self, sizes: list[tuple[Tensor, int]]) -> tuple[Access, ...]:
        """An access for each tensor; one that is given twice is read once."""
        several = {id(tensor): (tensor, size) for tensor, size in sizes} if len(sizes) > 1 else dict(enumerate(sizes))
        return tuple(self.storages.access(tensor, size) for tensor, size in several.values())

    def _lane(self, collective: Collective | None) -> Stream:
        """Asynchronous collectives run beside the stream that issues them, after what is on it."""
        if collective is None or not collective.asynchronous:
            return self._device.stream_now
        name = f"comm {collective.group}"
        if collective.peer >= 0:
            name += f" {'to' if collective.kind == 'send' else 'from'} {collective.peer}"
        lane = self._device.communication(name)
        lane.wait_stream(self._device.stream_now)
        return lane

    def _await(self, tensor: Tensor) -> None:
        number = self._arriving.pop(self.storages.access(tensor, 0).storage, None)
        if number is not None:
            self._device.stream_now.wait_for({number})

    def _name_buffers(self, known: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What FSDP2's operators tell of their arguments."""
        if known.short == "split_with_sizes_copy":
            for tensor in tensors_in(kwargs.get("out")):
                self.storages.name(tensor, "gathered")
        elif known.short == "chunk_cat":
            self.storages.name(kwargs["out"], "communication")
        elif known.short == "all_gather_copy_in":
            self.storages.name(args[1], "communication")
        elif known.namespace in ("c10d", "_c10d_functional"):
            for tensor in tensors_in(args):
                self.storages.communicates(tensor)

    def _owner(self, phase: Phase, read: list[tuple[Tensor, int]], made: list[Tensor]) -> str:
        """In the optimizer: the parameter that alone is stepped on."""
        if phase != "optimizer":
            return ""
        owners = {self.storages.owner(tensor) for tensor, _ in read} - {""}
        if len(owners) != 1:
            return ""
        (owner,) = owners
        for tensor in made:
            if not self.storages.owner(tensor):
                self.storages.name(tensor, "temporary", owner)
        return owner

    def _here(self) -> tuple[Phase, str, str, int]:
        phase, module = self.where.now()
        return phase, module, self._device.stream_now.name, self.where.micro_batch


def _read_and_changed(
    known: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
) -> tuple[list[tuple[Tensor, int]], list[Tensor]]:
    """Tensors that are read, with the bytes of them, and tensors that are changed."""
    read: list[tuple[Tensor, int]] = []
    changed: list[Tensor] = []
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        if not isinstance(value, Tensor | list | tuple):
            continue
        some = list(tensors_in(value))
        if place in known.changed:
            changed += some
            if known.overwrites:
                continue
        if place == 0 and known.short in READ_IN_PART:
            seen = _elements(args, made)
            read += [(tensor, min(bytes_of(tensor), seen * tensor.element_size())) for tensor in some]
        else:
            read += [(tensor, bytes_of(tensor)) for tensor in some]
    return read, changed


def _elements(args: tuple[Any, ...], made: list[Tensor]) -> int:
    """How many elements an operator looks up: as many as it returns, or is given places."""
    places = max((tensor.numel() for tensor in tensors_in(args[1:])), default=0)
    return max(places, max((tensor.numel() for tensor in made), default=0))


def _charged_as(known: OperatorTraits, collective: Collective | None, phase: Phase) -> OperatorKind:
    if collective is not None:
        return "collective"
    if known.kind == "pointwise" and phase == "optimizer":
        return "optimizer"
    return known.kind
