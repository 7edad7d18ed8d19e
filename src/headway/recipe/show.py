"""A recipe as TOML text that reads back to the same recipe."""

import json
from typing import Any

from headway.recipe.schema import Recipe


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; keys without a value (None) are left out, as TOML has no null."""
    return _table(recipe.model_dump(mode="json", exclude_none=True), prefix="").strip() + "\n"


def _table(table: dict[str, Any], prefix: str) -> str:
    tables = {key: value for key, value in table.items() if isinstance(value, dict) and value}
    values = {key: value for key, value in table.items() if key not in tables}
    text = f"\n[{prefix}]\n" if prefix and (values or not tables) else ""
    text += "".join(f"{_key(key)} = {_literal(value)}\n" for key, value in values.items())
    return text + "".join(
        _table(value, f"{prefix}.{_key(key)}" if prefix else _key(key)) for key, value in tables.items()
    )


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _literal(key)


def _literal(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return "[" + ", ".join(_literal(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {_literal(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"no TOML literal for {type(value).__name__}")
