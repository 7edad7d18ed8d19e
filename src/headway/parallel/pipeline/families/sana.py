"""Sana: as PixArt, with a norm behind the caption's projection."""

from headway.parallel.pipeline.families.pixart import edges
from headway.parallel.pipeline.recipe import StageRecipe, received, skipped

RECIPE = StageRecipe(
    blocks=("transformer_blocks",),
    returns=("hidden_states",),
    travels=("hidden_states", "encoder_hidden_states", "timestep", "embedded_timestep"),
    entry={
        "patch_embed": received("hidden_states"),
        "caption_projection": received("encoder_hidden_states"),
        "caption_norm": skipped,
        "time_embed": received("timestep", "embedded_timestep"),
    },
    exit=("norm_out", "proj_out", "scale_shift_table"),
    edges=edges,
    noted={"time_embed": (None, "embedded_timestep")},
)
