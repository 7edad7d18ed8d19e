"""FLUX.1: double-stream blocks, then single-stream ones; image, text and time embedding go from stage to stage."""

from collections.abc import Mapping
from typing import Any

from headway.parallel.pipeline.recipe import Edge, StageRecipe, received


def edges(config: Any, inputs: Mapping[str, Any]) -> tuple[Edge, ...]:
    """See EdgesOf."""
    width = config.num_attention_heads * config.attention_head_dim
    batch, image, _ = inputs["hidden_states"].shape
    text = inputs["encoder_hidden_states"].shape[1]
    return (
        Edge((batch, image, width), tokens=1),
        Edge((batch, text, width), tokens=1),
        Edge((batch, width)),
    )


RECIPE = StageRecipe(
    blocks=("transformer_blocks", "single_transformer_blocks"),
    returns=("encoder_hidden_states", "hidden_states"),
    travels=("hidden_states", "encoder_hidden_states", "temb"),
    entry={
        "x_embedder": received("hidden_states"),
        "context_embedder": received("encoder_hidden_states"),
        "time_text_embed": received("temb"),
    },
    exit=("norm_out", "proj_out"),
    edges=edges,
)
