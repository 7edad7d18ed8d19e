"""Writing a cluster as the TOML file that :func:`load_cluster` reads."""

import json
from typing import Any

from headway.cluster.topology import Cluster


def cluster_toml(cluster: Cluster) -> str:
    """The whole cluster as a file's text: accelerator, levels and achieved rates, with their sources."""
    document = cluster.model_dump(mode="json", exclude_none=True)
    plain = {key: value for key, value in document.items() if not isinstance(value, dict | list)}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    text = "".join(f"{key} = {_value(value)}\n" for key, value in plain.items())
    text += "units_checked = true\n"
    for key, table in tables.items():
        text += f"\n[{key}]\n" + "".join(f"{_key(name)} = {_value(value)}\n" for name, value in table.items())
    for level in document["levels"]:
        text += "\n[[levels]]\n" + "".join(f"{name} = {_value(value)}\n" for name, value in level.items())
    return text


def _value(value: Any) -> str:
    if isinstance(value, dict):
        if set(value) == {"value", "low", "high"}:
            return f"[{value['value']}, {value['low']}, {value['high']}]"
        return "{ " + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
