"""Models of diffusers and transformers: built on meta, filled after sharding, called by family."""

from headway.models.build import BuiltModel, build_model, load_tokenizer
from headway.models.diffusion import DenoisingModel
from headway.models.families import FAMILIES, Family
from headway.models.frozen import FrozenParts
from headway.models.language import next_token_logits, vision_language_logits
from headway.models.lora import adapter_state, lora_config, merge_lora
from headway.models.router_losses import RouterLosses
from headway.models.routers import check_routers, find_routers, own_balance_coefficient
from headway.models.text import CaptionTokens, TextFeatures
from headway.models.timesteps import image_tokens, timestep_shift

__all__ = [
    "FAMILIES",
    "BuiltModel",
    "CaptionTokens",
    "DenoisingModel",
    "Family",
    "FrozenParts",
    "RouterLosses",
    "TextFeatures",
    "adapter_state",
    "build_model",
    "check_routers",
    "find_routers",
    "image_tokens",
    "load_tokenizer",
    "lora_config",
    "merge_lora",
    "next_token_logits",
    "own_balance_coefficient",
    "timestep_shift",
    "vision_language_logits",
]
