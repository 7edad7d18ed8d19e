"""What memory is for, by the stack that allocated it.

A stack tells the purpose only as far as it reaches: with Python frames alone a gradient can't be told from what the
backward pass needs for a moment, so both are ``backward`` there; C++ frames tell ``AccumulateGrad``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from headway.explain.memory_snapshot.peak import Held
from headway.explain.memory_snapshot.snapshot import Stack


class Category(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed activations"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    DATA = "data"
    BEFORE_RECORDING = "before recording"
    OTHER = "other"


_Test = Callable[[str, str], bool]
_RULES: tuple[tuple[Category, _Test], ...] = (
    (
        Category.COMMUNICATION,
        lambda file, name: (
            "fully_shard" in file
            or "_fsdp_" in file
            or ("/fsdp/" in file and name != "forward")
            or file.endswith(("distributed_c10d.py", "_functional_collectives.py"))
            or "ProcessGroup" in name
            or "c10d::" in name
        ),
    ),
    (
        Category.OPTIMIZER,
        lambda file, name: "/optim/" in file or "/optimizers/" in file or file.endswith(("adamw.py", "adam.py")),
    ),
    (Category.GRADIENTS, lambda file, name: "AccumulateGrad" in name),
    (
        Category.RECOMPUTED,
        lambda file, name: (
            file.endswith("utils/checkpoint.py") and name in ("backward", "unpack_hook", "recompute_fn", "recompute")
        ),
    ),
    (
        Category.BACKWARD,
        lambda file, name: (
            name in ("_engine_run_backward", "_backward")
            or file.endswith("autograd/graph.py")
            or "autograd::Engine" in name
        ),
    ),
    (
        Category.DATA,
        lambda file, name: "/utils/data/" in file or "dataloader" in file.lower() or name in ("collate", "pin_memory"),
    ),
    (
        Category.PARAMETERS,
        lambda file, name: (
            name in ("_apply", "to_empty", "reset_parameters", "_load_from_state_dict", "load_state_dict", "__init__")
            or name in ("from_pretrained", "init_weights", "init_parameters", "from_config")
        ),
    ),
    (Category.ACTIVATIONS, lambda file, name: name in ("forward", "_call_impl", "_wrapped_call_impl")),
)
"""In order: the first rule that any frame of the stack fits."""


def category_of(held: Held, stacks: bool = True) -> Category:
    """What the memory is for; :data:`Category.OTHER` when nothing tells.

    ``stacks``: other allocations have a stack; then one without comes from the thread of the backward pass, where no
    Python runs.
    """
    if not held.stack:
        if not held.recorded:
            return Category.BEFORE_RECORDING
        return Category.BACKWARD if stacks else Category.OTHER
    frames = list(_inner_frames(held.stack))
    for category, fits in _RULES:
        if any(fits(file, name) for file, name in frames):
            return category
    return Category.OTHER


def _inner_frames(stack: Stack) -> Iterator[tuple[str, str]]:
    """Files and names, innermost first, up to an optimizer's closure: within it a whole step may run."""
    for frame in stack:
        if isinstance(frame, dict):
            name = str(frame.get("name", ""))
            if "closure" in name:
                return
            yield str(frame.get("filename", "")), name


def bytes_by_category(held: Iterable[Held], stacks: bool = True) -> Counter[Category]:
    """Bytes in use for each purpose; ``stacks`` as for :func:`category_of`."""
    known: dict[int, Category] = {}
    found: Counter[Category] = Counter()
    for block in held:
        key = id(block.stack) if block.stack else -int(block.recorded) - 1
        if key not in known:
            known[key] = category_of(block, stacks)
        found[known[key]] += block.size
    return found


def own_frame(stack: Stack) -> str:
    """``file:line in function`` of the innermost frame of the program itself; empty when there is none."""
    for frame in stack:
        file = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if file.endswith(".py") and "/site-packages/" not in file and "/torch/" not in file:
            return f"{file}:{frame.get('line', '?')} in {frame.get('name', '?')}"
    return ""
