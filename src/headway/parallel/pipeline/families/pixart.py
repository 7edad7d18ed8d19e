"""PixArt-α and PixArt-Σ: blocks take one form of the time embedding, the head another; both travel."""

from collections.abc import Mapping
from typing import Any

from headway.parallel.pipeline.recipe import Edge, StageRecipe, received


def edges(config: Any, inputs: Mapping[str, Any]) -> tuple[Edge, ...]:
    """See EdgesOf. The text is not split where sequences are: each rank's image attends to all of it."""
    width = config.num_attention_heads * config.attention_head_dim
    batch, _, height, columns = inputs["hidden_states"].shape
    image = (height // config.patch_size) * (columns // config.patch_size)
    return (
        Edge((batch, image, width), tokens=1),
        Edge((batch, inputs["encoder_hidden_states"].shape[1], width)),
        Edge((batch, 6 * width)),
        Edge((batch, width)),
    )


RECIPE = StageRecipe(
    blocks=("transformer_blocks",),
    returns=("hidden_states",),
    travels=("hidden_states", "encoder_hidden_states", "timestep", "embedded_timestep"),
    entry={
        "pos_embed": received("hidden_states"),
        "caption_projection": received("encoder_hidden_states"),
        "adaln_single": received("timestep", "embedded_timestep"),
    },
    exit=("norm_out", "proj_out", "scale_shift_table"),
    edges=edges,
    noted={"adaln_single": (None, "embedded_timestep")},
)
