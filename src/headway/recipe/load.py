"""Recipes from TOML and the command line, with errors that name file, key and the nearest known key."""

import difflib
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.errors import UserError
from headway.recipe.schema import Recipe


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and set ``overrides`` (``section.key=value``, the value in TOML syntax or a bare word) on top.

    Relative paths stay relative to the working directory, as on any command line. Raises UserError.
    """
    document = _read_toml(path)
    for override in overrides:
        _set(document, override)
    return parse_recipe(document, source=str(path))


def parse_recipe(document: dict[str, Any], source: str) -> Recipe:
    """Check a recipe document; ``source`` names it in errors. Raises UserError listing every wrong key."""
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise UserError("\n".join(f"{source}: {line}" for line in lines)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe file{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give a recipe file (.toml)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _set(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not separator or not all(names):
        raise UserError(f"--set {override}: write it as section.key=value, e.g. --set optim.lr=3e-4")
    table: Any = document
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {name} is a value, not a section")
    table[names[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(item: Any) -> str:
    place = [part for part in item["loc"] if part not in ("flow_matching", "next_token", "vision_language")]
    dotted = ".".join(str(part) for part in place) or "recipe"
    match item["type"]:
        case "extra_forbidden":
            return f"{dotted}: unknown key{_nearest_key(place)}"
        case "missing":
            return f"{dotted}: required key is missing"
        case "union_tag_not_found":
            return f"{dotted}.kind: required key is missing"
        case "value_error":
            return f"{dotted}: {item['ctx']['error']}"
        case "union_tag_invalid":
            return f"{dotted}.kind: {item['ctx']['tag']!r} is not one of {item['ctx']['expected_tags']}"
        case _:
            return f"{dotted}: {item['msg']} (got {item['input']!r})"


def _nearest_key(place: list[Any]) -> str:
    """The known key that the user may have meant: in the same section first, then anywhere."""
    known = known_keys()
    dotted = ".".join(str(part) for part in place)
    section, _, name = dotted.rpartition(".")
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(name, [key.rpartition(".")[2] for key in siblings], n=1)
    if near:
        return f"; did you mean {section + '.' if section else ''}{near[0]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(sorted(key.rpartition('.')[2] for key in siblings))}" if siblings else ""


def known_keys() -> list[str]:
    """Every dotted key that a recipe may hold (text encoders appear under ``model.text_encoders.*``)."""
    return [key for name, field in Recipe.model_fields.items() for key in (name, *_keys(field.annotation, name))]


def _keys(annotation: Any, prefix: str) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [
            key
            for name, field in annotation.model_fields.items()
            for key in (f"{prefix}.{name}", *_keys(field.annotation, f"{prefix}.{name}"))
        ]
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is dict:
        return _keys(arguments[1], f"{prefix}.*")
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return list(dict.fromkeys(key for argument in arguments for key in _keys(argument, prefix)))
    return []
