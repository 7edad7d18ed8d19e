"""The layouts that are checked: one of each kind and their main products, or those that the user lists."""

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from headway.errors import UserError
from headway.recipe import LayoutRecipe, MemoryRecipe

SPLIT_IN_TWO = {"interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"}
"""Schedules with two stages on each rank."""
SECTIONS = (
    {key: "layout" for key in LayoutRecipe.model_fields}
    | {key: "memory" for key in MemoryRecipe.model_fields}
    | {"micro_batch": "run", "compile": "run"}
)
"""Key of a layout -> the section of the recipe that it stands in."""


@dataclass(frozen=True)
class Layout:
    """Some keys of a recipe's layout, memory and run sections; every other key of a layout has its default."""

    name: str
    """As it is written in a list of layouts: ``tp=2,dp_shard=2``."""
    overrides: dict[str, dict[str, Any]] = field(hash=False)
    """By section of the recipe."""

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        sizes = self.overrides.get("layout", {})
        product = 1
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            product *= sizes.get(axis, 1)
        return product

    @property
    def data_ranks(self) -> int:
        """Ranks with batches of their own."""
        sizes = self.overrides.get("layout", {})
        return int(sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in a step: two or more, and enough for a pipeline of any schedule to be full."""
        return max(2, 2 * int(self.overrides.get("layout", {}).get("pp", 1)))


def parse_layouts(text: str) -> list[Layout]:
    """``tp=2,dp_shard=2;pp=2,pp_schedule=zbv``: layouts apart by semicolons, keys by commas. Raises UserError.

    Keys are those of the recipe's layout and memory sections, ``micro_batch`` and ``compile``.
    """
    layouts = [_parse(part.strip()) for part in text.split(";") if part.strip()]
    if not layouts:
        raise UserError('--layouts names no layout: write it as "tp=2,dp_shard=2;pp=2,pp_schedule=zbv", or auto')
    return layouts


def _parse(text: str) -> Layout:
    values: dict[str, Any] = {}
    for setting in re.split(r",(?![^\[]*\])", text):  # not inside of [1, 3]
        key, separator, value = (part.strip() for part in setting.partition("="))
        if not separator or not value:
            raise UserError(f"--layouts {text}: {setting.strip()!r} is not KEY=VALUE, e.g. tp=2")
        if key not in SECTIONS:
            near = difflib.get_close_matches(key, SECTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SECTIONS)}"
            raise UserError(f"--layouts {text}: {key} is no key of a layout; {hint}")
        values[key] = _value(value)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        size = values.get(axis, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(f"--layouts {text}: {axis} = {size} is not a number of ranks, 1 or more")
    return make_layout(**values)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_layout(**values: Any) -> Layout:
    """A layout from its keys."""
    overrides: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        overrides.setdefault(SECTIONS[key], {})[key] = value
    return Layout(",".join(f"{key}={_written(value)}" for key, value in values.items()) or "dp_shard=1", overrides)


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def auto_layouts(*, language: bool, experts: bool) -> list[Layout]:
    """One layout of each kind, the main products of two axes on up to four ranks, and three axes on eight.

    ``language``: sequence parallelism is a layout of its own. ``experts``: the model has experts to share out.
    """
    return [make_layout(**values) for values in [*_kinds(language, experts), *_products(experts)]]


def _kinds(language: bool, experts: bool) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"dp_replicate": 2},
        {"dp_shard": 2},
        {"dp_shard": 2, "activation_checkpointing": "full"},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2},
        {"cp": 2, "cp_kind": "ulysses"},
        {"cp": 2, "cp_kind": "ring"},
        {"cp": 4, "cp_kind": "both", "cp_ulysses": 2},
        *({"pp": 2, "pp_schedule": schedule} for schedule in ("gpipe", "1f1b", *sorted(SPLIT_IN_TWO))),
    ]
    if language:
        # Toys have four heads, and with grouped queries two key-value heads: fewer than four ranks.
        kinds[4:5] = [{"tp": 2, "sequence_parallel": False}, {"tp": 2}, {"tp": 4}]
    if experts:
        kinds.append({"dp_shard": 2, "ep": 2})
    return kinds


def _products(experts: bool) -> list[dict[str, Any]]:
    products: list[dict[str, Any]] = [
        {"tp": 2, "dp_shard": 2, "activation_checkpointing": "full"},
        {"cp": 2, "dp_shard": 2, "activation_checkpointing": "full"},
        {"pp": 2, "dp_shard": 2, "activation_checkpointing": "full"},
        {"pp": 2, "pp_schedule": "zbv", "dp_shard": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2, "cp": 2},
    ]
    if experts:
        products += [{"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}]
    return products
