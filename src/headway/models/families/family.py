"""What differs from one diffusion family to the next, in one record a family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headway.errors import UserError
from headway.models.families import flux, pixart, sana, sd3, wan
from headway.models.text import TextFeatures, as_written


class VelocityCall(Protocol):
    """Calls a denoiser.

    ``noisy`` (B, C[, F], H, W) in the compute dtype, ``timestep`` (B,) float32 in [0, 1] (1 is pure noise),
    ``features`` by encoder name, ``guidance`` (B,) float32. Returns d noisy / d timestep = noise - data, shaped like
    ``noisy``.
    """

    def __call__(
        self,
        transformer: Any,
        noisy: Tensor,
        timestep: Tensor,
        features: dict[str, TextFeatures],
        guidance: Tensor,
    ) -> Tensor: ...


class EncodeCall(Protocol):
    """Encodes ``tokens`` (B, L) with the pipeline's component ``name``; ``mask`` (B, L) is False on padding."""

    def __call__(self, name: str, encoder: Any, tokens: Tensor, mask: Tensor) -> TextFeatures: ...


@dataclass(frozen=True)
class Family:
    """A diffusion family of diffusers."""

    name: str
    transformer_class: str
    pipeline_class: str
    required_encoders: tuple[str, ...]
    optional_encoders: tuple[str, ...]
    velocity: VelocityCall
    encode: EncodeCall
    clean_caption: Callable[[str], str]
    widths: Callable[[Any, Mapping[str, Any]], list[tuple[str, int]]]
    """(denoiser's config, encoders' configs) -> (key of the denoiser's config, what the encoders make it be)."""
    entry: str
    """Path of the denoiser's first weight that is outside its blocks: its dtype in forward is the compute dtype."""
    video: bool = False
    patch: int = 1
    """Latent pixels on a side that one call packs into a token before the denoiser sees them."""

    def check_encoders(self, names: list[str]) -> None:
        """Raises UserError unless ``names`` are the family's pipeline components."""
        known = (*self.required_encoders, *self.optional_encoders)
        missing = [n for n in self.required_encoders if n not in names]
        unknown = [n for n in names if n not in known]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
            raise UserError(f"model.text_encoders {what}: {self.pipeline_class} uses {', '.join(known)}")

    def check_widths(self, config: Any, encoders: Mapping[str, Any]) -> None:
        """Raises UserError when the text encoders' features do not fit the denoiser."""
        for key, width in self.widths(config, encoders):
            if config[key] != width:
                raise UserError(f"model.config {key} = {config[key]}, but the text encoders make it {width}")


FAMILIES = {
    family.transformer_class: family
    for family in (
        Family(
            "flux", "FluxTransformer2DModel", "FluxPipeline", ("text_encoder", "text_encoder_2"), (),
            flux.velocity, flux.encode, as_written, flux.widths, "x_embedder.weight", patch=2,
        ),
        Family(
            "sd3", "SD3Transformer2DModel", "StableDiffusion3Pipeline", ("text_encoder", "text_encoder_2"),
            ("text_encoder_3",), sd3.velocity, sd3.encode, as_written, sd3.widths, "pos_embed.proj.weight",
        ),
        Family(
            "wan", "WanTransformer3DModel", "WanPipeline", ("text_encoder",), (),
            wan.velocity, wan.encode, wan.clean_caption, wan.widths, "patch_embedding.weight", video=True,
        ),
        Family(
            "pixart", "PixArtTransformer2DModel", "PixArtSigmaPipeline", ("text_encoder",), (),
            pixart.velocity, pixart.encode, pixart.clean_caption, pixart.widths, "pos_embed.proj.weight",
        ),
        Family(
            "sana", "SanaTransformer2DModel", "SanaPipeline", ("text_encoder",), (),
            sana.velocity, sana.encode, pixart.clean_caption, sana.widths, "patch_embed.proj.weight",
        ),
    )
}  # fmt: skip


def family_of(class_name: str) -> Family:
    """The family whose denoiser is ``class_name``; UserError when it is none of them."""
    if class_name not in FAMILIES:
        raise UserError(
            f"model.class_name = {class_name!r} is no diffusion model known here: use one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[class_name]
