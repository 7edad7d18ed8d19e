"""What a trainer told about its steps, whoever it was: rows in order, and notable lines between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Happening(StrEnum):
    """What a line between the steps tells of."""

    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    GARBAGE_COLLECTION = "garbage collection"
    RESTART = "restart"
    OUT_OF_MEMORY = "out of memory"
    ALLOCATION_RETRY = "allocation retry"
    COLLECTIVE_TIMEOUT = "collective timeout"
    SKIPPED_STEP = "skipped step"


@dataclass(frozen=True)
class Row:
    """One line about a step, or about all steps since the line before."""

    line: int
    step: int
    values: Mapping[str, float]
    """By name: ``loss``, ``grad_norm``, ``step_s``, ``tokens_per_s``, ``samples_per_s``, ``memory_gib``, ``skipped``,
    ``data_wait_s``, ``batch``."""
    stamp_s: float | None = None
    """When it was written, seconds since some day."""


@dataclass(frozen=True)
class Note:
    """A line between the rows."""

    line: int
    what: Happening
    text: str
    step: int
    """Of the row before; -1 before the first."""
    seconds: float | None = None
    """How long it took, where the line tells."""


@dataclass(frozen=True, eq=False)
class Series:
    """The rows and notes of one file."""

    path: Path
    trainer: str
    rows: Sequence[Row]
    notes: Sequence[Note]

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """Step of each row, int64 ``[rows]``."""
        return np.array([row.step for row in self.rows], dtype=np.int64)

    @cached_property
    def covered(self) -> NDArray[np.int64]:
        """Steps that each row stands for (since the row before), at least 1: int64 ``[rows]``."""
        gaps = np.diff(self.steps)
        usual = int(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1
        return np.concatenate([[usual], np.where(gaps > 0, gaps, usual)]) if len(self.rows) else gaps

    def column(self, name: str) -> Floats:
        """One value of each row, NaN where it is not told: float64 ``[rows]``."""
        return np.array([row.values.get(name, np.nan) for row in self.rows], dtype=np.float64)

    @cached_property
    def step_s(self) -> Floats:
        """Seconds a step: as told, else of the lines' time stamps; NaN where neither tells. float64 ``[rows]``."""
        told = self.column("step_s")
        if np.isfinite(told).any():
            return told
        stamps = np.array([np.nan if row.stamp_s is None else row.stamp_s for row in self.rows], dtype=np.float64)
        if len(stamps) < 3 or not np.isfinite(stamps).all():
            return told
        # A row may follow a restart: the stamps before it are of another process.
        elapsed = np.where(np.diff(self.steps) > 0, np.diff(stamps), np.nan)
        known = elapsed[np.isfinite(elapsed)]
        coarse = bool((stamps % 1 == 0).all())
        if not len(known) or (coarse and np.median(known) < _COARSE_STAMPS_S):
            return told
        return np.concatenate([[np.nan], np.where(elapsed > 0, elapsed, np.nan) / self.covered[1:]])

    @cached_property
    def pace(self) -> Floats:
        """Time a step in any unit: seconds, or else what throughput tells. float64 ``[rows]``."""
        if np.isfinite(self.step_s).any():
            return self.step_s
        for name in ("tokens_per_s", "samples_per_s"):
            rate = self.column(name)
            if np.isfinite(rate).any():
                return np.where(rate > 0, 1 / np.where(rate > 0, rate, 1), np.nan)
        return self.step_s

    @property
    def in_seconds(self) -> bool:
        """``pace`` is seconds."""
        return bool(np.isfinite(self.step_s).any())

    @cached_property
    def warm_up(self) -> int:
        """Rows at the beginning that are slower than what comes after: compilation, caches, the allocator."""
        pace = self.pace
        if not np.isfinite(pace).any():
            return 0
        settled = float(np.nanmedian(pace[len(pace) // 2 :])) if np.isfinite(pace[len(pace) // 2 :]).any() else np.inf
        for place in range(len(pace) // 2):
            if np.isfinite(pace[place]) and pace[place] <= _SETTLED * settled:
                return place
        return len(pace) // 2


_COARSE_STAMPS_S = 20
"""Stamps of whole seconds tell times from here on to within a few percent."""
_SETTLED = 1.15
"""A row that is no more than this times what comes later is no warm-up any more."""
