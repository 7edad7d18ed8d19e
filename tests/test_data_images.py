"""Pictures of every kind become upright RGB on white, of one size; damaged ones are named."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_files import encoded, flip_bits, picture
from headway.data import BadRecord
from headway.data.images import decode_image, read_image


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colour_of(data: bytes) -> list[int]:
    return read_image(data, (4, 4), "record").float().mean(dim=(1, 2)).round().int().tolist()


def test_a_picture_is_resized_to_cover_and_cropped_at_the_centre():
    wide = Image.new("RGB", (400, 100), "red")
    wide.paste((0, 0, 255), (150, 0, 250, 100))
    square = read_image(file_of(wide, "PNG"), (50, 50), "record")
    assert square.shape == (3, 50, 50)
    assert square.is_contiguous()
    assert square[:, 25, 5:45].float().mean(dim=1).tolist() == pytest.approx([0, 0, 255], abs=2)
    assert read_image(file_of(wide, "PNG"), (20, 80), "record").shape == (3, 20, 80)


def test_shrinking_is_antialiased():
    pixels = np.indices((256, 256)).sum(axis=0) % 2 * 255
    small = read_image(file_of(Image.fromarray(pixels.astype(np.uint8)), "PNG"), (16, 16), "record")
    assert (small.float() - 127.5).abs().max() < 8


def test_transparent_pixels_are_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    half = Image.new("LA", (8, 8), (0, 128))
    assert colour_of(file_of(clear, "PNG")) == [255, 255, 255]
    assert colour_of(file_of(half, "PNG")) == [127, 127, 127]


def test_palettes_with_and_without_transparency():
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([255, 0, 0, 0, 200, 0])
    assert colour_of(file_of(palette, "PNG")) == [0, 200, 0]
    assert colour_of(file_of(palette, "PNG", transparency=1)) == [255, 255, 255]
    assert colour_of(file_of(palette, "GIF")) == [0, 200, 0]


def test_sixteen_bits_are_scaled_not_clipped():
    pixels = np.full((8, 8), 0x8000, dtype=np.uint16)
    assert colour_of(file_of(Image.fromarray(pixels), "PNG")) == [128, 128, 128]
    assert colour_of(file_of(Image.fromarray(pixels), "TIFF")) == [128, 128, 128]


def test_grey_one_bit_and_cmyk():
    assert colour_of(file_of(Image.new("L", (8, 8), 77), "PNG")) == [77, 77, 77]
    assert colour_of(file_of(Image.new("1", (8, 8), 1), "PNG")) == [255, 255, 255]
    assert colour_of(file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")) == pytest.approx([254, 0, 0], abs=3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    upright = Image.new("RGB", (16, 32), "white")
    upright.paste((0, 0, 0), (0, 0, 16, 8))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = decode_image(file_of(stored, "PNG", exif=exif), "record")
    assert shown.size == (16, 32)
    assert shown.getpixel((8, 3)) == (0, 0, 0)
    assert shown.getpixel((8, 20)) == (255, 255, 255)


@pytest.mark.parametrize("data", [b"", b"\x89PNG", b"not a picture" * 50, encoded(1)[:60], encoded(1, "JPEG")[:-200]])
def test_truncated_and_foreign_files_are_named(data):
    with pytest.raises(BadRecord, match=r"shard\.tar:key") as bad:
        read_image(data, (8, 8), "shard.tar:key")
    assert "not a readable picture" in bad.value.reason


def test_a_decompression_bomb_is_named_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30 * 20 - 1)
    with pytest.raises(BadRecord, match="over the limit"):
        read_image(encoded(1), (8, 8), "record")


def test_a_floating_point_picture_is_named():
    with pytest.raises(BadRecord, match="floating-point"):
        read_image(file_of(Image.new("F", (8, 8), 0.5), "TIFF"), (8, 8), "record")


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"]),
    places=st.lists(st.integers(0, 2**20), min_size=1, max_size=20),
    kept=st.floats(0, 1),
)
def test_any_damage_gives_a_picture_of_the_right_shape_or_a_bad_record(kind, places, kept):
    data = flip_bits(encoded(3, kind), places)
    for damaged in (data, data[: int(kept * len(data))]):
        try:
            image = read_image(damaged, (8, 12), "record")
        except BadRecord:
            continue
        assert image.shape == (3, 8, 12)
        assert image.dtype == torch.uint8


def test_reading_keeps_the_pixels_of_a_picture_of_the_right_size():
    expected = torch.from_numpy(np.array(picture(5))).permute(2, 0, 1)
    assert torch.equal(read_image(encoded(5), (20, 30), "record"), expected)
