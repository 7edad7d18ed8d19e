"""Conversations with pictures, one a line: {"messages": [{"role": …, "content": text or list of parts}, …]}.

A part is {"type": "text", "text": …} or {"type": "image", "image": path}, relative to the file the line stands in.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headway.data.images import decode_image
from headway.data.sample import BadRecord, Conversation, Sample
from headway.data.source import fingerprint_of
from headway.errors import UserError


class JsonlConversations:
    """One record for each line that is not empty; lines are found at once and parsed when they are read."""

    captions = None

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        lines = [(number, *line) for number, file in enumerate(files) for line in _lines(file)]
        if not lines:
            raise UserError(f"data.path: {', '.join(map(str, files[:3]))} hold no lines")
        self.lines = np.array(lines, dtype=np.int64)
        """(N, 4): number of the file, number of the line, offset and length in bytes."""
        self.fingerprint = fingerprint_of(["conversations", self.lines.astype("<i8").tobytes()])

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, index: int, epoch: int) -> Sample:
        """conversation: pictures in RGB at their own size. Raises BadRecord for a damaged line or picture."""
        number, line, offset, length = (int(value) for value in self.lines[index])
        path = self.files[number]
        record = f"{path}:{line}"
        try:
            with path.open("rb") as file:
                file.seek(offset)
                fields = json.loads(file.read(length))
            return Sample(conversation=_conversation(fields, path.parent, record))
        except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
            raise BadRecord(record, f"not a conversation ({type(error).__name__}: {error})") from error

    def blank(self) -> Sample:
        """A conversation of two dots."""
        messages = [{"role": role, "content": [{"type": "text", "text": "."}]} for role in ("user", "assistant")]
        return Sample(conversation=Conversation(messages, [], "blank"))


def _lines(path: Path) -> list[tuple[int, int, int]]:
    """(number, offset, length) of the lines that are not empty."""
    lines: list[tuple[int, int, int]] = []
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                lines.append((number, offset, len(line)))
            offset += len(line)
    return lines


def _conversation(fields: Any, folder: Path, record: str) -> Conversation:
    messages: list[dict[str, Any]] = []
    images: list[Image.Image] = []
    for message in fields["messages"]:
        role, content = message["role"], message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages.append({"role": _text(role), "content": [_part(part, folder, record, images) for part in parts]})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message of the assistant, so nothing to learn")
    return Conversation(messages, images, record)


def _part(part: dict[str, Any], folder: Path, record: str, images: list[Image.Image]) -> dict[str, str]:
    """The part as chat templates take it; a picture's pixels go to the end of ``images``."""
    if part["type"] == "text":
        return {"type": "text", "text": _text(part["text"])}
    if part["type"] != "image":
        raise ValueError(f"a part of type {part['type']!r}, which is neither text nor image")
    path = folder / _text(part["image"])
    with path.open("rb") as file:
        images.append(decode_image(file, f"{record}, picture {path}"))
    return {"type": "image"}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is expected")
    return value
