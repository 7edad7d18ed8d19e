"""Reads slices of a folder of safetensors, and maps its names and layout onto a model's.

Checkpoints of transformers may name and lay out tensors differently from the model (experts saved one by one, renamed
prefixes); the library's own conversion mapping says how, and its own operations convert the pieces that are read here.
"""

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from headway.errors import UserError


@dataclass(frozen=True)
class Slice:
    """A rank's box in a tensor: where it begins and how long it is, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def index(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


class SafetensorsFolder:
    """The tensors of one model folder: a single safetensors file, or several behind an index.json.

    Raises UserError when the folder holds no safetensors, or a file that is named by the index is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._open_files: dict[str, Any] = {}
        self._file_of = self._list_keys()

    def keys(self) -> list[str]:
        return list(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def read(self, key: str, part: Slice | None = None) -> torch.Tensor:
        """The tensor ``key``, or only its box ``part``, on the CPU in its stored dtype. Reads no other bytes."""
        tensor: torch.Tensor = self._slice(key)[part.index() if part else ...]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def _slice(self, key: str) -> Any:
        return self._file(self._file_of[key]).get_slice(key)

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                self._open_files[name] = safe_open(self.folder / name, framework="pt")
            except (FileNotFoundError, SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / name} is missing or damaged: {error}") from None
        return self._open_files[name]

    def _list_keys(self) -> dict[str, str]:
        indexes = sorted(self.folder.glob("*.safetensors.index.json"))
        files = sorted(self.folder.glob("*.safetensors"))
        if len(indexes) == 1:
            try:
                return dict(json.loads(indexes[0].read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{indexes[0]} is not an index of safetensors: {error!r}") from None
        if len(files) == 1 and not indexes:
            return {key: files[0].name for key in self._file(files[0].name).keys()}  # noqa: SIM118
        found = ", ".join(f.name for f in [*indexes, *files]) or "none"
        raise UserError(f"{self.folder} must hold one *.safetensors file or one index of them; found: {found}")


class Source(NamedTuple):
    """Where a tensor of the model comes from: a stored tensor as it is, or several through a converter."""

    keys: dict[str, list[str]]
    """Stored keys by the pattern of the converter; one entry with one key without a converter."""
    converter: WeightConverter | None
    first_target: str


def match_weights(module: nn.Module, folder: SafetensorsFolder) -> dict[str, Source]:
    """A source for every parameter and persistent buffer of ``module`` (a bare diffusers or transformers model).

    Raises UserError that names some missing, unexpected or mis-shaped tensors. A name may be missing when a tensor it
    is tied to is there.
    """
    expected = module.state_dict()
    sources: dict[str, Source] = {}
    unexpected = []
    renamings, converters = _conversions(module)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for key in sorted(folder.keys(), key=dot_natural_key):
        name, pattern = _renamed(key, module, renamings, converters, expected)
        if name not in expected:
            unexpected.append(key)
        elif pattern is None:
            sources[name] = Source({key: [key]}, None, name)
        else:
            source = sources.setdefault(name, Source({}, by_pattern[pattern], name))
            source.keys.setdefault(pattern, []).append(key)
    for source in list(sources.values()):
        sources |= {name: source for name in _other_targets(source, expected)}
    _check(module, folder, sources, unexpected)
    return sources


def read_tensor(folder: SafetensorsFolder, source: Source, name: str, part: Slice, module: nn.Module) -> torch.Tensor:
    """The box ``part`` of the model's tensor ``name``, in the stored dtype. Experts outside the box are not read."""
    if 0 in part.shape:
        return torch.empty(part.shape)
    if source.converter is None:
        (key,) = next(iter(source.keys.values()))
        return folder.read(key, part)
    keys, rest = source.keys, part.index()
    if isinstance(source.converter.operations[0], MergeModulelist) and source.converter.operations[0].dim == 0:
        keys = {pattern: found[rest[0]] for pattern, found in keys.items()}
        rest = (slice(None), *rest[1:])
    converter: Any = deepcopy(source.converter)
    for pattern, found in keys.items():
        for key in found:
            converter.add_tensor(source.first_target, key, pattern, folder.read(key))
    converted = converter.convert(source.first_target, model=module, config=module.config)[name]
    whole: torch.Tensor = converted[0] if isinstance(converted, list) else converted
    return whole[rest]


def _conversions(module: nn.Module) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    if not isinstance(module, PreTrainedModel):
        return [], []
    conversions = get_model_conversion_mapping(module)
    return (
        [c for c in conversions if isinstance(c, WeightRenaming)],
        [c for c in conversions if isinstance(c, WeightConverter)],
    )


def _renamed(
    key: str, module: nn.Module, renamings: list[Any], converters: list[Any], expected: dict[str, torch.Tensor]
) -> tuple[str, str | None]:
    """The model's name for a stored key and the converter's pattern that matched, as in ``from_pretrained``."""
    if not isinstance(module, PreTrainedModel):
        return key, None
    prefix = module.base_model_prefix
    name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
    if name not in expected and key in expected:
        name, pattern = rename_source_key(key, [], [], prefix, expected)
    return name, pattern


def _other_targets(source: Source, expected: dict[str, torch.Tensor]) -> list[str]:
    """A converter with several targets is found under its first; these are the names of the others."""
    if source.converter is None:
        return []
    first, *others = source.converter.target_patterns
    return [n for n in (source.first_target.replace(first, other) for other in others) if n in expected]


def _check(module: nn.Module, folder: SafetensorsFolder, sources: dict[str, Source], unexpected: list[str]) -> None:
    expected = module.state_dict(keep_vars=True)
    found_storages = {id(expected[name]) for name in sources}
    missing = [n for n, tensor in expected.items() if id(tensor) not in found_storages]
    missing = _not_ignored(missing, getattr(module, "_keys_to_ignore_on_load_missing", None))
    unexpected = _not_ignored(unexpected, getattr(module, "_keys_to_ignore_on_load_unexpected", None))
    misshaped = [
        f"{name} is {folder.shape(key)} there and {tuple(expected[name].shape)} in the model"
        for name, source in sources.items()
        if source.converter is None
        for key in next(iter(source.keys.values()))
        if folder.shape(key) != tuple(expected[name].shape)
    ]
    misshaped += [
        f"{name} has {len(keys)} parts there and {expected[name].shape[0]} in the model"
        for name, source in sources.items()
        if source.converter is not None and isinstance(source.converter.operations[0], MergeModulelist)
        for keys in source.keys.values()
        if len(keys) != expected[name].shape[0]
    ]
    problems = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped))
        if names
    ]
    if problems:
        raise UserError(f"the weights in {folder.folder} do not fit {type(module).__name__}: {'; '.join(problems)}")


# Tables that old checkpoints carry and models compute (transformers ignores them in every model too).
ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


def _not_ignored(names: list[str], patterns: Any) -> list[str]:
    return [n for n in names if not any(re.search(pattern, n) for pattern in (*ALWAYS_IGNORED, *(patterns or ())))]
