"""Which records train and which validate: by caption, and by a seeded draw."""

import difflib
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headway.data.randomness import permutation
from headway.errors import UserError


def split_records(
    size: int,
    captions: pa.LargeStringArray | None,
    *,
    include: Sequence[str],
    hold_out: Sequence[str],
    validation_fraction: float,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Indices (training, validation), int64, each ascending.

    ``include`` keeps records whose caption matches one of the regular expressions; ``hold_out`` moves captions (equal
    up to case) to validation, and ``validation_fraction`` of the rest follows them, drawn by ``seed``.
    Raises UserError when a pattern or caption fits nothing, naming near ones, or when nothing is left to train on.
    """
    kept, held = np.arange(size), np.empty(0, dtype=np.int64)
    if include or hold_out:
        if captions is None:
            key = "include" if include else "hold_out"
            raise UserError(f"data.{key} chooses by caption, and the records of this data.kind have none")
        texts = captions.to_pylist()
        kept = kept[_matching(texts, include)] if include else kept
        is_held = _held_out([texts[index] for index in kept], hold_out)
        kept, held = kept[~is_held], kept[is_held]
    if validation_fraction > 0:
        count = max(1, round(validation_fraction * len(kept)))
        drawn = permutation(len(kept), seed=seed, stream="validation", step=0)
        held = np.concatenate([held, kept[drawn[:count]]])
        kept = kept[drawn[count:]]
    if not len(kept):
        raise UserError(
            f"no record is left to train on: {size} in data.path, {len(held)} of them held out; name fewer captions in "
            "data.hold_out, or lower data.validation_fraction"
        )
    return np.sort(kept), np.sort(held)


def _matching(captions: list[str | None], patterns: Sequence[str]) -> np.ndarray:
    """bool (N,). Raises UserError for a pattern that is not a regular expression or fits no caption."""
    matching = np.zeros(len(captions), dtype=bool)
    for pattern in patterns:
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise UserError(f"data.include: {pattern!r} is not a regular expression ({error})") from error
        fits = np.array([caption is not None and search(caption) is not None for caption in captions], dtype=bool)
        if not fits.any():
            raise UserError(f"data.include: no caption matches {pattern!r}{_near(pattern, captions)}")
        matching |= fits
    return matching


def _held_out(captions: list[str | None], hold_out: Sequence[str]) -> np.ndarray:
    """bool (N,). Raises UserError for a caption that no record has."""
    folded = [caption.strip().casefold() if caption is not None else None for caption in captions]
    for caption in hold_out:
        if caption.strip().casefold() not in folded:
            near = _near(caption, captions)
            raise UserError(f"data.hold_out: no record kept by data.include has the caption {caption!r}{near}")
    wanted = {caption.strip().casefold() for caption in hold_out}
    return np.array([caption in wanted for caption in folded], dtype=bool)


def _near(text: str, captions: list[str | None]) -> str:
    known = sorted({caption for caption in captions if caption})
    near = difflib.get_close_matches(re.sub(r"[\\^$()\[\]|*+?]", "", text), known, n=3, cutoff=0.5)
    return f"; near ones: {', '.join(repr(caption) for caption in near)}" if near else ""
