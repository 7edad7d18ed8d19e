"""The diffusion families: how each one's denoiser is called and its captions are encoded."""

from headway.models.families.family import FAMILIES, Family, family_of

__all__ = ["FAMILIES", "Family", "family_of"]
