"""Decoder-only language models of transformers: an embedding, layers, a norm and a head, as their own plans say."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from headway.parallel.pipeline.recipe import Edge, StageRecipe, blank

PLANNED = {"embed_tokens", "layers", "norm"}
"""The parts that ``base_model_pp_plan`` names where layers pass on nothing but hidden states."""


def edges(config: Any, inputs: Mapping[str, Any]) -> tuple[Edge, ...]:
    """See EdgesOf."""
    return (Edge((*inputs["input_ids"].shape, config.get_text_config().hidden_size), tokens=1),)


def recipe_of_plan(model: Any) -> StageRecipe | None:
    """The recipe of a model whose library says that it is such a sequence; None otherwise."""
    plan = model.config.base_model_pp_plan
    if plan is None or set(plan) != PLANNED or "lm_head" not in dict(model.named_children()):
        return None
    base = model.base_model_prefix
    layer = model.get_submodule(f"{base}.layers.0")
    if inspect.signature(type(layer).forward).return_annotation is not torch.Tensor:
        return None  # some models share a plan with Llama, yet their layers hand on more than hidden states
    return StageRecipe(
        blocks=(f"{base}.layers",),
        returns=("hidden_states",),
        travels=("hidden_states",),
        entry={f"{base}.embed_tokens": blank("hidden_states")},
        exit=(f"{base}.norm", "lm_head"),
        edges=edges,
    )
