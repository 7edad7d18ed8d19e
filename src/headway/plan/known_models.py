"""Shapes of models by name, from their published configurations (known_models.toml)."""

import re
import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from headway.plan.shape import Attention, Block, Experts, ModelShape, StateSpace


def known_model(name: str) -> ModelShape | None:
    """The shape that a model's name stands for; None when the name is not known."""
    plain = re.sub(r"[^a-z0-9.]+", " ", name.lower()).strip()
    for entry in _entries():
        if re.search(entry["match"], plain):
            return _shape(name, entry)
    return None


def _shape(name: str, entry: dict[str, Any]) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=entry["hidden"],
        blocks=tuple(_blocks(entry)),
        vocabulary=entry.get("vocabulary", 0),
        other_parameters=entry.get("other_parameters", 0.0),
        frozen_bytes=entry.get("frozen_bytes", 0.0),
        norm=entry.get("norm", "rms"),
        predicted_tokens=entry.get("predicted_tokens", 0),
    )


def _blocks(entry: dict[str, Any]) -> list[Block]:
    attention = Attention(**entry["attention"])
    experts = Experts(**entry["experts"]) if "experts" in entry else None
    layers, width = entry["layers"], entry.get("mlp_width", 0)
    common: dict[str, Any] = {"gated": entry.get("gated", True), "modulation": entry.get("modulation", 0)}
    if "state_space" in entry:
        mixers, attending = entry["mamba_layers"], entry["attention_layers"]
        rest = layers - mixers - attending
        return [
            Block(attending, attention=attention, **common),
            Block(mixers, state_space=StateSpace(**entry["state_space"]), **common),
            Block(rest, experts=experts, mlp_width=width, **common),
        ]
    if "experts_every" in entry:
        half = layers / entry["experts_every"]
        dense = Block(layers - half, attention=attention, mlp_width=width, **common)
        return [dense, Block(half, attention=attention, experts=experts, **common)]
    first = entry.get("dense_first", 0)
    found = [Block(first, attention=attention, mlp_width=width, **common)] if first else []
    block = Block(layers - first, attention=attention, mlp_width=0 if experts else width, experts=experts, **common)
    if "alternate_window" in entry:
        narrow = replace(attention, window=entry["alternate_window"])
        return [*found, replace(block, count=block.count / 2), replace(block, count=block.count / 2, attention=narrow)]
    return [*found, block]


@cache
def _entries() -> list[dict[str, Any]]:
    text = files("headway.plan").joinpath("known_models.toml").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = tomllib.loads(text)["model"]
    return entries
