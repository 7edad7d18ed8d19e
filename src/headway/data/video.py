"""Folders of video clips with captions, decoded by FFmpeg through PyAV."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from headway.data.folders import CaptionedFolder
from headway.data.images import Size
from headway.data.sample import BadRecord, Sample
from headway.errors import UserError

VIDEO_SUFFIXES = frozenset({".mp4", ".mkv", ".webm"})


class VideoFolder(CaptionedFolder):
    """One record for each clip: its first ``frames`` frames, every ``stride``-th."""

    def __init__(self, folder: Path, size: Size, frames: int, stride: int) -> None:
        try:
            import_module("av")
        except ImportError as error:
            raise UserError("data.kind = \"video_folder\" needs av: pip install 'headway[video]'") from error
        super().__init__(folder, VIDEO_SUFFIXES)
        self.size = size
        self.frames = frames
        self.stride = stride

    def read_file(self, path: Path) -> Sample:
        """video. Raises BadRecord, also when the clip is too short."""
        return Sample(video=read_video(path, self.size, self.frames, self.stride))

    def blank(self) -> Sample:
        """A black video without a caption."""
        return Sample(video=torch.zeros(3, self.frames, *self.size, dtype=torch.uint8), caption="")


def read_video(path: Path, size: Size, frames: int, stride: int) -> torch.Tensor:
    """uint8 (3, F, H, W) of frames 0, stride, 2·stride, …, upright, resized to cover ``size``, cropped at the centre.

    Raises BadRecord when the clip is damaged or has fewer than (frames - 1)·stride + 1 frames.
    """
    try:
        pictures = _decode(path, size, frames, stride)
    except Exception as error:  # besides FFmpegError, damaged streams raise IndexError, ValueError and others
        raise BadRecord(str(path), f"not a readable video ({type(error).__name__}: {error})") from error
    if len(pictures) < frames:
        needed = (frames - 1) * stride + 1
        raise BadRecord(str(path), f"too short: {frames} frames at stride {stride} need {needed} frames")
    return torch.from_numpy(np.stack(pictures)).permute(3, 0, 1, 2).contiguous()


def _decode(path: Path, size: Size, frames: int, stride: int) -> list[np.ndarray]:
    """Up to ``frames`` arrays uint8 (H, W, 3)."""
    pictures: list[np.ndarray] = []
    with import_module("av").open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # the loader's workers are the parallelism
        for number, frame in enumerate(container.decode(stream)):
            if number % stride == 0:
                pictures.append(_picture(frame, size))
            if len(pictures) == frames:
                break
    return pictures


def _picture(frame: Any, size: Size) -> np.ndarray:
    height, width = size
    # The rotation is counter-clockwise, in degrees, as a phone held upright writes it into the file.
    upright = np.rot90(frame.to_ndarray(format="rgb24"), k=frame.rotation // 90)
    fitted = ImageOps.fit(Image.fromarray(np.ascontiguousarray(upright)), (width, height), Image.Resampling.LANCZOS)
    return np.asarray(fitted)
