"""The trained part of a diffusion pipeline as one module: the denoiser and the text encoders that train with it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headway.models.families import Family
from headway.models.text import TextFeatures


class DenoisingModel(nn.Module):
    """Predicts the velocity noise - data of noisy latents, given captions.

    Children: ``transformer``, and ``text_encoders.<component>`` for the trainable ones.
    """

    def __init__(
        self, family: Family, transformer: nn.Module, text_encoders: Mapping[str, nn.Module], padding: Mapping[str, int]
    ) -> None:
        super().__init__()
        self.family = family
        self.transformer = transformer
        self.text_encoders = nn.ModuleDict(text_encoders)
        self.text_encoders.eval()
        self._padding = dict(padding)
        owner, _, self._entry_name = family.entry.rpartition(".")
        # In a tuple, so that the module is not registered twice. It survives being wrapped by adapters.
        self._entry = (transformer.get_submodule(owner),)

    def train(self, mode: bool = True) -> "DenoisingModel":
        """Training mode for the denoiser only: text encoders drop nothing out, for their dropout has no key."""
        super().train(mode)
        self.text_encoders.eval()
        return self

    def forward(
        self,
        noisy: Tensor,
        timestep: Tensor,
        tokens: Mapping[str, Tensor],
        condition: Mapping[str, TextFeatures],
        guidance: float = 1.0,
    ) -> Tensor:
        """Velocity, shaped like ``noisy``, in the compute dtype.

        ``noisy`` (B, C[, F], H, W) latents; ``timestep`` (B,) float32 in [0, 1], 1 being pure noise; ``tokens``
        (B, L) int64 for each trainable text encoder; ``condition`` the features of each frozen one; ``guidance`` the
        scale told to guidance-distilled models, ignored by others.
        """
        dtype = getattr(self._entry[0], self._entry_name).dtype
        features = dict(condition)
        for name, encoder in self.text_encoders.items():
            mask = tokens[name] != self._padding[name]
            features[name] = self.family.encode(name, encoder, tokens[name], mask)
        scale = torch.full_like(timestep, guidance)
        return self.family.velocity(self.transformer, noisy.to(dtype), timestep, features, scale)
