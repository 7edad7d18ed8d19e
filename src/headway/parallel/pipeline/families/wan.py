"""Wan: the text travels with the video, and so do both forms of the time embedding: blocks take one, the head another.

The patch embedding's stand-in hands on the latents: only their shape is read before the first own block.
"""

from collections.abc import Mapping
from typing import Any

from headway.parallel.pipeline.recipe import Edge, StageRecipe, received, skipped


def edges(config: Any, inputs: Mapping[str, Any]) -> tuple[Edge, ...]:
    """See EdgesOf. The text is not split where sequences are: each rank's video attends to all of it."""
    width = config.num_attention_heads * config.attention_head_dim
    batch, _, *sizes = inputs["hidden_states"].shape
    frames, rows, columns = (size // patch for size, patch in zip(sizes, config.patch_size, strict=True))
    return (
        Edge((batch, frames * rows * columns, width), tokens=1),
        Edge((batch, inputs["encoder_hidden_states"].shape[1], width)),
        Edge((batch, width)),
        Edge((batch, 6 * width)),
    )


CONDITIONS = ("time_embedding", "time_projection", "encoder_hidden_states", None)
RECIPE = StageRecipe(
    blocks=("blocks",),
    returns=("hidden_states",),
    travels=("hidden_states", "encoder_hidden_states", "time_embedding", "time_projection"),
    entry={"patch_embedding": skipped, "condition_embedder": received(*CONDITIONS)},
    exit=("norm_out", "proj_out", "scale_shift_table"),
    edges=edges,
    noted={"condition_embedder": ("time_embedding", "time_projection", None, None)},
)
