"""The text of a trace file, piece by piece: unzipped, cut between events, and mended where writers break JSON."""

import re
import zlib
from collections.abc import Iterator
from typing import IO

PIECE_BYTES = 1 << 20

_BEGINS_GZIP = b"\x1f\x8b"
_BETWEEN_OBJECTS = re.compile(rb"\}\s*,\s*\{")
_NEAR_THE_END = 1 << 16
_CONTROL_TO_SPACE = bytes(32 if byte < 32 else byte for byte in range(256))
_NOT_FINITE = re.compile(rb"(?<=[\s:,\[])[-+]?(?:nan|inf|infinity)(?=\s*[,\]}])", re.I)
_BACKSLASH = re.compile(rb'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """The text of a plain or gzip file, ``PIECE_BYTES`` at most at a time; of a torn gzip file, what is there.

    Raises zlib.error for a damaged one.
    """
    first = file.read(len(_BEGINS_GZIP))
    if first != _BEGINS_GZIP:
        yield first
        while piece := file.read(PIECE_BYTES):
            yield piece
        return
    unzip, packed = zlib.decompressobj(wbits=31), first
    while packed or (packed := file.read(PIECE_BYTES // 8)):
        yield unzip.decompress(packed, PIECE_BYTES)
        packed = unzip.unconsumed_tail
        if unzip.eof:
            packed, unzip = unzip.unused_data, zlib.decompressobj(wbits=31)


def cuts(text: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Where ``text`` may be cut between two objects: (end of the first part, start of the second), the last first.

    Each is a guess: the place may lie in a string, or deeper than it seems. Towards the head ever fewer are offered.
    """
    for begin in (max(0, len(text) - _NEAR_THE_END), 0):
        found = [(match.start() + 1, match.end() - 1) for match in _BETWEEN_OBJECTS.finditer(text, begin)]
        back = 1
        while back <= len(found):
            yield found[-back]
            back *= 2


def mended(text: bytes) -> bytes:
    """JSON as some profilers write it, made valid.

    NaN and inf become null; stray control characters, stray backslashes and what is no UTF-8 become text.
    """
    text = text.decode("utf-8", errors="replace").encode().translate(_CONTROL_TO_SPACE)
    text = _BACKSLASH.sub(lambda match: match[1] or rb"\\", text)
    return _NOT_FINITE.sub(b"null", text)
