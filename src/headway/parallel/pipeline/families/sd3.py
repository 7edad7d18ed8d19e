"""Stable Diffusion 3: joint blocks; image, text and time embedding go from stage to stage."""

from collections.abc import Mapping
from typing import Any

from headway.parallel.pipeline.recipe import Edge, StageRecipe, received


def edges(config: Any, inputs: Mapping[str, Any]) -> tuple[Edge, ...]:
    """See EdgesOf."""
    width = config.num_attention_heads * config.attention_head_dim
    batch, _, height, columns = inputs["hidden_states"].shape
    image = (height // config.patch_size) * (columns // config.patch_size)
    text = inputs["encoder_hidden_states"].shape[1]
    return (
        Edge((batch, image, width), tokens=1),
        Edge((batch, text, config.caption_projection_dim), tokens=1),
        Edge((batch, width)),
    )


RECIPE = StageRecipe(
    blocks=("transformer_blocks",),
    returns=("encoder_hidden_states", "hidden_states"),
    travels=("hidden_states", "encoder_hidden_states", "temb"),
    entry={
        "pos_embed": received("hidden_states"),
        "context_embedder": received("encoder_hidden_states"),
        "time_text_embed": received("temb"),
    },
    exit=("norm_out", "proj_out"),
    edges=edges,
)
