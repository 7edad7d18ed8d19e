"""One model of a library, on the meta device until it is filled: from safetensors, or with its initial values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.models.classes import find_class, instantiate, read_config
from headway.models.deferred_init import InitialValues, record_construction
from headway.models.weights import SafetensorsFolder, Slice, Source, match_weights, read_tensor

# Names that checkpointing and compilation put into the path of a module.
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")

Placeholder = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""(shape of this rank's slice, dtype) -> a tensor in place of stored and initial values: nothing is read or drawn."""


@dataclass
class Component:
    """A model whose tensors do not exist yet, and where each of them comes from."""

    module: Any
    initial: InitialValues | Placeholder
    folder: SafetensorsFolder | None
    sources: dict[str, tuple[str, Source]]
    """Name in the module -> (name in the bare model, stored tensors), for those that are in the folder."""

    def fill(self, device: torch.device, known: Mapping[str, torch.Tensor] | None = None) -> None:
        """Give every parameter and buffer of the module its value on ``device``; a DTensor gets this rank's slice.

        ``known`` are whole tensors by name in the module that are taken in place of stored or initial ones. Tied
        parameters stay one. To be called after sharding, once.
        """
        for slots in _slots_by_tensor(self.module).values():
            names = [name for name, _, _ in slots]
            old = _get(slots[0])
            part = _local_part(old)
            if isinstance(self.initial, InitialValues):
                local = self._value(names, part, known or {}).to(device=device, dtype=old.dtype).contiguous()
                if local.untyped_storage().nbytes() > local.nbytes:
                    local = local.clone()  # a slice would keep the whole tensor's memory
            else:
                local = self.initial(part.shape, old.dtype)
            new = _like(old, local)
            for _, owner, attribute in slots:
                held: dict[str, Any] = owner._parameters if attribute in owner._parameters else owner._buffers
                held[attribute] = new

    def _value(self, names: list[str], part: Slice, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name in names:
            if name in known:
                return known[name][part.index()]
        stored = next((name for name in names if name in self.sources), None)
        if stored is None or self.folder is None:
            assert isinstance(self.initial, InitialValues)
            return self.initial.value(names[0])[part.index()]
        original, source = self.sources[stored]
        return read_tensor(self.folder, source, original, part, self.module)


def build_component(
    class_name: str,
    path: Path | None,
    subfolder: str,
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    seed: int,
    scope: str,
    load_weights: bool = True,
    attention: str | None = None,
    prepare: Callable[[nn.Module], None] = lambda module: None,
    placeholder: Placeholder | None = None,
) -> Component:
    """The model ``class_name`` on meta with parameters in ``dtype`` (buffers keep the library's).

    ``scope`` is the model's place in its pipeline. ``prepare`` changes the module in place (adapters) before names are
    final. With a ``placeholder`` only the config is read from ``path``. Raises UserError for an unknown class or config
    key, and for weights that do not fit.
    """
    model_class = find_class(class_name)
    whole_config = read_config(path, subfolder, config, model_class)
    stored = path is not None and load_weights and placeholder is None
    folder = SafetensorsFolder(path / subfolder) if stored and path is not None else None
    matched: dict[int, tuple[str, Source]] = {}

    def construct() -> nn.Module:
        module = instantiate(model_class, whole_config, attention)
        if folder is not None:
            tensors = module.state_dict(keep_vars=True)
            sources = match_weights(module, folder)
            matched.update({id(tensors[name]): (name, source) for name, source in sources.items()})
        prepare(module)
        return module

    module, initial = _constructed(construct, seed, scope, placeholder)
    sources = {name: matched[id(t)] for name, t in _named_tensors(module) if id(t) in matched}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return Component(module, initial, folder, sources)


def _constructed(
    construct: Callable[[], nn.Module], seed: int, scope: str, placeholder: Placeholder | None
) -> tuple[nn.Module, InitialValues | Placeholder]:
    if placeholder is None:
        return record_construction(construct, seed, scope)
    with torch.device("meta"):
        return construct(), placeholder


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


Slot = tuple[str, nn.Module, str]


def _slots_by_tensor(module: nn.Module) -> dict[int, list[Slot]]:
    """Every place that holds a tensor, (name, module, attribute), grouped by tensor: tied ones have several."""
    slots: dict[int, list[Slot]] = {}
    for path, owner in module.named_modules():
        plain = [part for part in path.split(".") if part and part not in WRAPPERS]
        for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                slots.setdefault(id(tensor), []).append((".".join([*plain, attribute]), owner, attribute))
    return slots


def _get(slot: Slot) -> torch.Tensor:
    _, owner, attribute = slot
    tensor = owner._parameters[attribute] if attribute in owner._parameters else owner._buffers[attribute]
    assert tensor is not None
    return tensor


def _local_part(tensor: torch.Tensor) -> Slice:
    if not isinstance(tensor, DTensor):
        return Slice((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Slice(tuple(offset), tuple(shape))


def _wrapped_like(old: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` within what wraps ``old``: weights that are gathered in another dtype than they are trained in."""
    if not is_traceable_wrapper_subclass(old):
        return local
    (inner, *_), context = old.__tensor_flatten__()
    kind: Any = type(old)
    wrapped: torch.Tensor = kind.__tensor_unflatten__({inner: local}, context, local.size(), local.stride())
    return wrapped


def _like(old: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` in the place of ``old``: a DTensor of the same mesh and placements, a Parameter that trains alike."""
    new = _wrapped_like(old.to_local() if isinstance(old, DTensor) else old, local)
    if isinstance(old, DTensor):
        new = DTensor.from_local(
            new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
