"""What every parameter and buffer would have been filled with, remembered while a model is built on the meta device.

Large models are built without memory, sharded, and filled afterwards, each rank its own slices. The libraries fill
their tensors while they construct modules, so the operators of the construction are recorded here and replayed later,
for one tensor at a time, on the CPU. Randomness of a replay is keyed by (seed, tensor name): it depends neither on the
order of replays nor on rank or layout.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

CPU = torch.device("cpu")
# In-place operators whose result does not depend on what was there before.
OVERWRITING = (
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.copy_.default,
)


class StorageView(NamedTuple):
    """A meta tensor as a window on its storage. Views and ``.data`` of one tensor share a storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Operation(NamedTuple):
    """One recorded operator; meta tensors among the arguments are StorageViews, real ones are kept as they were."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[StorageView | None]
    reads: frozenset[int]
    writes: frozenset[int]
    overwritten: int | None
    """The storage of which nothing older is left after the operation, if there is one."""


class InitialValues:
    """Initial values of a model's tensors by name, as the library that defines the model would have set them."""

    def __init__(
        self, operations: list[Operation], tensors: dict[str, StorageView | torch.Tensor], seed: int, scope: str
    ) -> None:
        self._operations = operations
        self._tensors = tensors
        self._seed = seed
        self._scope = scope

    def names(self) -> list[str]:
        """Names of all parameters and buffers; tied ones under each of their names."""
        return list(self._tensors)

    def value(self, name: str) -> torch.Tensor:
        """The whole tensor ``name`` on the CPU, in the dtype the library made it with. Tied names give equal values."""
        tensor = self._tensors[name]
        if isinstance(tensor, torch.Tensor):
            return tensor.clone()
        needed = self._operations_of(tensor.storage)
        owner = next(n for n, t in self._tensors.items() if isinstance(t, StorageView) and t.storage == tensor.storage)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # torch.manual_seed would also note for every device, with a trace of the stack, that it is to be seeded.
            torch.default_generator.manual_seed(_key(self._seed, f"{self._scope}.{owner}"))
            storages: dict[int, torch.Tensor] = {}
            for operation in needed:
                _replay(operation, storages)
        if tensor.storage not in storages:
            raise RuntimeError(f"{name}: its construction was not recorded")
        return _window(tensor, storages).clone(memory_format=torch.contiguous_format)

    def _operations_of(self, storage: int) -> list[Operation]:
        """The operations that decide what a storage holds in the end, in the order they ran."""
        wanted, settled, needed = {storage}, set[int](), []
        for operation in reversed(self._operations):
            makes = {window.storage for window in operation.outputs if window is not None} - operation.reads
            # What is written over later need not be drawn: libraries draw most weights twice.
            if (operation.writes - settled | makes) & wanted:
                needed.append(operation)
                wanted |= operation.reads
                if operation.overwritten is not None:
                    settled.add(operation.overwritten)
        return needed[::-1]


def record_construction(
    construct: Callable[[], nn.Module], seed: int, scope: str = ""
) -> tuple[nn.Module, InitialValues]:
    """Run ``construct`` on the meta device; return its module, and what the module's tensors would have held.

    ``scope`` tells apart models with equal names inside, such as two text encoders: it is part of the random key.
    """
    recorder = _Recorder()
    with torch.device("meta"), _LiteralsAreData(), recorder:
        module = construct()
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return module, InitialValues(recorder.operations, {n: recorder.describe(t) for n, t in tensors}, seed, scope)


class _LiteralsAreData(TorchFunctionMode):
    """Keeps the numbers of ``torch.tensor([...])``, which on the meta device would be lost before any operator runs."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            return function(*args, **(kwargs | {"device": CPU})).to("meta")
        return function(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Logs each operator that makes or changes a meta tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        # A storage is known by its address, so it must outlive the recording.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def describe(self, tensor: torch.Tensor) -> StorageView | torch.Tensor:
        """A meta tensor as a window on its storage; a real one as a copy."""
        if not tensor.is_meta:
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return StorageView(storage._cdata, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @staticmethod
    def _overwritten(function: Any, args: tuple[Any, ...]) -> int | None:
        if function not in OVERWRITING or not args[0].is_meta:
            return None
        storage = args[0].untyped_storage()
        return storage._cdata if args[0].nbytes == storage.nbytes() else None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        if not any(tensor.is_meta for tensor in [*inputs, *outputs]):
            return result
        read = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.is_meta}
        made = {tensor.untyped_storage()._cdata for tensor in outputs if tensor.is_meta} - read
        changed = _changed_storages(function, args, kwargs)
        if made | changed:
            arguments, keywords = tree_map_only(torch.Tensor, self.describe, (args, kwargs))
            windows = [self.describe(t) if t.is_meta else None for t in outputs]
            whole = self._overwritten(function, args)
            self.operations.append(
                Operation(function, arguments, keywords, windows, frozenset(read), frozenset(made | changed), whole)  # type: ignore[arg-type]
            )
        return result


def _changed_storages(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Storages of the meta tensors that the operator's schema says it writes into."""
    changed: set[int] = set()
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed |= {
                t.untyped_storage()._cdata for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor) and t.is_meta
            }
    return changed


def _replay(operation: Operation, storages: dict[int, torch.Tensor]) -> None:
    """Run one operation on real tensors. ``storages``: recorded storage -> the flat real tensor in its place."""

    def real(value: Any) -> Any:
        if isinstance(value, StorageView):
            return _window(value, storages)
        return CPU if isinstance(value, torch.device) else value

    is_leaf = lambda value: isinstance(value, StorageView)  # noqa: E731
    arguments, keywords = tree_map(real, (operation.arguments, operation.keywords), is_leaf=is_leaf)
    result = operation.function(*arguments, **keywords)
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    for output, window in zip(outputs, operation.outputs, strict=True):
        if window is not None and window.storage not in storages:
            length = window.offset + sum((n - 1) * s for n, s in zip(window.size, window.stride, strict=True)) + 1
            flat = torch.empty(0 if 0 in window.size else length, dtype=window.dtype)
            storages[window.storage] = flat
            _window(window, storages).copy_(output)


def _window(view: StorageView, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    flat = storages[view.storage]
    return torch.empty(0, dtype=view.dtype).set_(flat.untyped_storage(), view.offset, view.size, view.stride)


def _key(seed: int, name: str) -> int:
    """A 63-bit seed from (seed, name), the same on every machine and version."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
