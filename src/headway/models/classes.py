"""Finds a model class of diffusers or transformers by name, and its checked config. Local files only."""

import difflib
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headway.errors import UserError

# Keys that every config of transformers takes, also where its class does not declare them.
UNDECLARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


def find_class(class_name: str) -> type[nn.Module]:
    """The model class ``class_name`` of diffusers, else of transformers. UserError, with near names, if none."""
    for library, base in ((diffusers, ModelMixin), (transformers, PreTrainedModel)):
        found = getattr(library, class_name, None)
        if isinstance(found, type) and issubclass(found, base) and issubclass(found, nn.Module):
            return found
    names = [n for library in (diffusers, transformers) for n in dir(library) if n[:1].isupper()]
    raise UserError(f"class_name = {class_name!r} is no model of diffusers or transformers{nearest(class_name, names)}")


def nearest(wrong: str, right: Iterable[str]) -> str:
    """A hint that ends an error message, empty when nothing is near: ``: did you mean 'x'?``."""
    near = difflib.get_close_matches(wrong, sorted(set(right)), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ""


def read_config(
    path: Path | None, subfolder: str, config: dict[str, Any], model_class: type[nn.Module]
) -> dict[str, Any]:
    """``path/subfolder/config.json`` overridden by ``config`` key by key (nested dictionaries too).

    Raises UserError for a folder without a readable config.json, one of another diffusers class, and unknown keys.
    """
    folder_config: dict[str, Any] = {}
    if path is not None:
        file = path / subfolder / "config.json"
        try:
            folder_config = json.loads(file.read_text())
        except FileNotFoundError:
            raise UserError(f"{file} does not exist: path (with subfolder) must be a model folder") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not readable: {error}") from None
        saved_class = folder_config.get("_class_name")
        if saved_class not in (None, model_class.__name__):
            raise UserError(f"{file} is of a {saved_class}, not of class_name = {model_class.__name__!r}")
    _check_keys(config, model_class)
    return _merged(folder_config, config)


def instantiate(model_class: Any, config: dict[str, Any], attention: str | None = None) -> nn.Module:
    """The model in float32 on the current default device, with the initialisation of its library.

    ``attention`` is the attention implementation of transformers models ("sdpa"); None leaves the library's choice.
    """
    try:
        if issubclass(model_class, PreTrainedModel):
            typed = model_class.config_class(**{k: v for k, v in config.items() if not k.startswith("_")})
            keywords = {} if attention is None else {"attn_implementation": attention}
            model: nn.Module = model_class._from_config(typed, dtype=torch.float32, **keywords)
            model.initialize_weights()  # type: ignore[operator]  # left out by the library on the meta device
            return model
        built: nn.Module = model_class.from_config({k: v for k, v in config.items() if not k.startswith("_")})
        return built
    except (
        ValueError,
        TypeError,
        ZeroDivisionError,
        AssertionError,
        NotImplementedError,
        StrictDataclassError,
    ) as error:
        raise UserError(f"{model_class.__name__} refuses its config: {error}") from error


def _check_keys(config: dict[str, Any], model_class: type[nn.Module]) -> None:
    if issubclass(model_class, ConfigMixin):
        _refuse_unknown(
            config, set(inspect.signature(model_class.__init__).parameters) - {"self"}, model_class.__name__
        )
    elif issubclass(model_class, PreTrainedModel):
        assert model_class.config_class is not None
        _check_transformers_keys(config, model_class.config_class, _read_by(model_class))


def _check_transformers_keys(config: dict[str, Any], config_class: type[PreTrainedConfig], read: set[str]) -> None:
    default = config_class()
    known = {*default.to_dict(), *config_class.attribute_map, *vars(default), *read, *UNDECLARED}
    _refuse_unknown(config, known, config_class.__name__)
    for name, sub_class in config_class.sub_configs.items():
        if isinstance(config.get(name), dict) and hasattr(sub_class, "sub_configs"):
            _check_transformers_keys(config[name], sub_class, read)


def _read_by(model_class: type[nn.Module]) -> set[str]:
    """Config keys that the model's code reads though its config class does not declare them (Qwen3-MoE's head_dim)."""
    source = inspect.getsource(sys.modules[model_class.__module__])
    return set(re.findall(r"""config(?:\.|, ["'])(\w+)""", source))


def _refuse_unknown(config: dict[str, Any], known: set[str], of: str) -> None:
    for key in config:
        if key not in known:
            raise UserError(f"config key {key!r} is unknown to {of}{nearest(key, known)}")


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = (
            _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        )
    return merged
