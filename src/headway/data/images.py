"""Encoded pictures to RGB tensors of one size."""

import io
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps

from headway.data.sample import BadRecord

Size = tuple[int, int]
"""(height, width) in pixels."""

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


def image_size(resolution: int | tuple[int, int]) -> Size:
    """The recipe's ``data.resolution`` as (height, width)."""
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def read_image(file: BinaryIO | bytes, size: Size, record: str) -> torch.Tensor:
    """uint8 (3, H, W): upright, on white, resized to cover ``size`` (antialiased, Lanczos) and cropped at the centre.

    Raises BadRecord naming ``record`` when the file is damaged, empty, too large to be a picture, or none at all.
    """
    height, width = size
    fitted = ImageOps.fit(decode_image(file, record), (width, height), Image.Resampling.LANCZOS)
    return to_tensor(fitted)


def decode_image(file: BinaryIO | bytes, record: str) -> Image.Image:
    """The picture in RGB at its own size: turned as EXIF says, transparent parts on white. Raises BadRecord."""
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise BadRecord(record, f"{image.width} x {image.height} pixels are over the limit of {limit}")
            return _to_rgb(ImageOps.exif_transpose(image))
    except BadRecord:
        raise
    except Exception as error:  # a decoder fed damaged bytes raises anything, SyntaxError included
        raise BadRecord(record, f"not a readable picture ({type(error).__name__}: {error})") from error


def to_tensor(image: Image.Image) -> torch.Tensor:
    """uint8 (3, H, W) of an RGB picture."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def blank_image(size: Size) -> torch.Tensor:
    """uint8 (3, H, W) of black."""
    return torch.zeros(3, *size, dtype=torch.uint8)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range")
    if image.mode.startswith("I"):
        # 16 bits a pixel, which PIL would clip at 255 rather than scale.
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
