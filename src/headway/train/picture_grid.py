"""Samples as one picture: a grid with a caption under each; videos as rows of frames, and moving beside it."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

SMALLEST_SIDE = 128
"""Pixels: smaller pictures are enlarged by a whole number, so that each of their pixels can be seen."""
GAP = 10
CAPTION_SIZE, HEADING_SIZE = 14, 20
CAPTION_LINES = 2
FRAMES_SHOWN = 8
PAPER, INK, FAINT = (255, 255, 255), (25, 25, 25), (215, 215, 215)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def save_grid(
    pictures: Tensor,
    captions: Sequence[str],
    path: Path,
    *,
    columns: int | None = None,
    headings: Mapping[int, str] | None = None,
    frames_per_s: float = 8.0,
) -> None:
    """Save ``pictures``, uint8 (N, 3, H, W) or videos (N, 3, F, H, W), with N captions, as the PNG ``path``.

    ``headings`` maps the index of a picture to a line that stands above it and begins a new row. Videos show at most
    ``FRAMES_SHOWN`` frames, evenly spaced, and move in a WebP of the same name. Raises ValueError on wrong shapes.
    """
    if pictures.dtype != torch.uint8 or pictures.dim() not in (4, 5) or pictures.shape[1] != 3:
        raise ValueError(f"uint8 (N, 3, [F,] H, W) was expected, not {pictures.dtype} {tuple(pictures.shape)}")
    if len(pictures) != len(captions) or len(pictures) == 0:
        raise ValueError(f"{len(pictures)} pictures and {len(captions)} captions")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows(len(pictures), columns, headings or {})
    if pictures.dim() == 4:
        _grid(pictures, captions, rows, headings or {}).save(path)
        return
    one_a_row = [[index] for index in range(len(pictures))]
    _grid(_film_strips(pictures), captions, one_a_row, headings or {}).save(path)
    moments = [_grid(frame, captions, rows, headings or {}) for frame in pictures.unbind(2)]
    moving = path.with_suffix(".webp")
    moments[0].save(moving, save_all=True, append_images=moments[1:], duration=round(1000 / frames_per_s), loop=0)


def _rows(count: int, columns: int | None, headings: Mapping[int, str]) -> list[list[int]]:
    """Indices of pictures, row by row: a heading begins a new row."""
    starts = sorted({0, *(index for index in headings if 0 <= index < count)})
    groups = [list(range(start, end)) for start, end in zip(starts, [*starts[1:], count], strict=True)]
    widest = max(map(len, groups))
    width = columns or min(widest, 8, max(4, math.ceil(math.sqrt(count))))
    return [group[at : at + width] for group in groups for at in range(0, len(group), width)]


def _film_strips(videos: Tensor) -> Tensor:
    """Frames side by side, a white column between them: (N, 3, F, H, W) to (N, 3, H, F' · (W + 1) - 1)."""
    chosen = torch.linspace(0, videos.shape[2] - 1, min(FRAMES_SHOWN, videos.shape[2])).round().long()
    frames = functional.pad(videos[:, :, chosen], (0, 1), value=255)
    return torch.cat(frames.unbind(2), dim=-1)[..., :-1]


def _grid(pictures: Tensor, captions: Sequence[str], rows: list[list[int]], headings: Mapping[int, str]) -> Image.Image:
    enlarge = max(1, math.ceil(SMALLEST_SIDE / pictures.shape[-2]))
    height, width = pictures.shape[-2] * enlarge, pictures.shape[-1] * enlarge
    caption_font, heading_font = ImageFont.load_default(CAPTION_SIZE), ImageFont.load_default(HEADING_SIZE)
    line_height, heading_height = _line_height(caption_font), _line_height(heading_font) + GAP
    wrapped = [_wrap(caption, width, caption_font) for caption in captions]
    tops, y = [], GAP
    for row in rows:
        y += heading_height if row[0] in headings else 0
        tops.append(y)
        y += height + 4 + line_height * max(len(wrapped[index]) for index in row) + GAP
    canvas_width = GAP + max(map(len, rows)) * (width + GAP)
    longest_heading = max((math.ceil(heading_font.getlength(text)) for text in headings.values()), default=0)
    canvas = Image.new("RGB", (max(canvas_width, longest_heading + 2 * GAP), y), PAPER)
    draw = ImageDraw.Draw(canvas)
    for row, top in zip(rows, tops, strict=True):
        if row[0] in headings:
            draw.text((GAP, top - heading_height), headings[row[0]], INK, font=heading_font)
        for column, index in enumerate(row):
            left = GAP + column * (width + GAP)
            picture = Image.fromarray(pictures[index].permute(1, 2, 0).contiguous().cpu().numpy())
            canvas.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
            draw.rectangle((left - 1, top - 1, left + width, top + height), outline=FAINT)
            for number, line in enumerate(wrapped[index]):
                draw.text((left, top + height + 4 + number * line_height), line, INK, font=caption_font)
    return canvas


def _line_height(font: Font) -> int:
    return math.ceil(font.getbbox("Ågjpqy|")[3]) + 2


def _wrap(text: str, width: int, font: Font) -> list[str]:
    """``text`` in at most ``CAPTION_LINES`` lines of ``width`` pixels, the last one cut with an ellipsis."""
    # The font that comes with Pillow has no accented letters.
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    lines: list[str] = []
    line = ""
    for word in plain.split():
        candidate = f"{line} {word}".strip()
        if line and font.getlength(candidate) > width:
            lines.append(line)
            candidate = word
        line = candidate
    lines.append(line)
    if len(lines) > CAPTION_LINES:
        lines = [*lines[: CAPTION_LINES - 1], " ".join(lines[CAPTION_LINES - 1 :])]
    return [_fit(line, width, font) for line in lines]


def _fit(line: str, width: int, font: Font) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"
