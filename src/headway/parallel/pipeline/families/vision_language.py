"""Qwen2.5-VL and Qwen3-VL: the first stage sees the pictures; what comes behind it is a decoder.

Each stage is given the whole conversation, works out positions and masks from it, and puts blank pictures where the
first stage has put seen ones: its own blocks get what it received in any case.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from headway.parallel.pipeline.families.decoder import edges
from headway.parallel.pipeline.recipe import StageRecipe, blank
from headway.parallel.pipeline.stand_ins import Passage, StandIn


@dataclass
class Seen(ModelOutput):
    """What a vision tower returns."""

    pooler_output: Any = None
    deepstack_features: Any = None


class BlankPictures(StandIn):
    """Stands for a vision tower: zeros in the place of the pictures' features, none for deeper layers."""

    def __init__(self, passage: Passage, tower: Any) -> None:
        super().__init__()
        self._passage = passage
        self.spatial_merge_size = tower.spatial_merge_size

    @property
    def dtype(self) -> Any:
        """That of activations."""
        return self._passage.received["hidden_states"].dtype

    def forward(self, pixel_values: Tensor, **keywords: Any) -> Seen:
        """(patches, features) -> zeros (patches / merged in one token, H), which take no memory."""
        like = self._passage.received["hidden_states"]
        tokens = pixel_values.shape[0] // self.spatial_merge_size**2
        return Seen(pooler_output=like.new_zeros(()).expand(tokens, like.shape[-1]), deepstack_features=[])


def recipe_of(model: Any) -> StageRecipe:
    """The recipe for a model; Qwen3-VL adds features of pictures to the results of its first layers."""
    decoder = "model.language_model"
    return StageRecipe(
        blocks=(f"{decoder}.layers",),
        returns=("hidden_states",),
        travels=("hidden_states",),
        entry={"model.visual": BlankPictures, f"{decoder}.embed_tokens": blank("hidden_states")},
        exit=(f"{decoder}.norm", "lm_head"),
        edges=edges,
        first_blocks=max(1, len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))),
    )
