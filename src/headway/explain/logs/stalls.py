"""Rows of a log that are far slower than the others, how regularly they come, and what happens beside them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headway.explain.logs.series import Happening, Note, Series

_FEWEST_ROWS = 8
_SLOW, _SPREADS = 1.25, 6
_LOST_SHARE, _LOST_SHARE_OF_ONE = 0.01, 0.03
"""Of the time; a single slow row happens in any run."""
_REGULAR = 0.7
_CAUSES = (Happening.CHECKPOINT, Happening.VALIDATION, Happening.GARBAGE_COLLECTION)


@dataclass(frozen=True)
class Stalls:
    """The slow rows of a log."""

    rows: tuple[int, ...]
    steps: tuple[int, ...]
    usual: float
    """Median time a step, in the unit of the series' pace."""
    worst: float
    lost_s: float
    """What the slow rows took beyond the usual, in that unit."""
    window_s: float
    """What all rows took after the warm-up, in that unit."""
    period: int
    """Steps between them; 0 when they come irregularly."""
    beside: tuple[Note, ...]
    """Lines of the one thing that happened beside most of them."""


def stalls_of(series: Series) -> Stalls | None:
    """The slow rows after the warm-up; None when all rows lie within their own spread, or little is lost."""
    pace = series.pace.copy()
    pace[: series.warm_up] = np.nan
    known = np.flatnonzero(np.isfinite(pace))
    if len(known) < _FEWEST_ROWS:
        return None
    usual = float(np.median(pace[known]))
    spread = 1.4826 * float(np.median(np.abs(pace[known] - usual)))
    slow = [int(place) for place in known if pace[place] > max(_SLOW * usual, usual + _SPREADS * spread)]
    lost = float(sum((pace[place] - usual) * series.covered[place] for place in slow))
    window = float((pace[known] * series.covered[known]).sum())
    if not slow or lost < (_LOST_SHARE if len(slow) > 1 else _LOST_SHARE_OF_ONE) * window:
        return None
    steps = tuple(series.rows[place].step for place in slow)
    return Stalls(
        rows=tuple(slow),
        steps=steps,
        usual=usual,
        worst=float(max(pace[place] for place in slow)),
        lost_s=lost,
        window_s=window,
        period=_period(steps),
        beside=_beside(series, slow),
    )


def _period(steps: Sequence[int]) -> int:
    """The distance that most of the slow steps have; 0 when there is none."""
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(gaps) < 2:
        return 0
    gap, count = Counter(gaps).most_common(1)[0]
    return gap if count >= _REGULAR * len(gaps) and gap > 1 else 0


def _beside(series: Series, slow: Sequence[int]) -> tuple[Note, ...]:
    """Notes between the row before a slow row and the row after it, when most slow rows have one of the same kind."""
    found: dict[Happening, dict[int, list[Note]]] = {}
    for place in slow:
        first = series.rows[place - 1].line if place else 0
        last = series.rows[place].line
        for note in series.notes:
            if first <= note.line <= last and note.what in _CAUSES:
                found.setdefault(note.what, {}).setdefault(place, []).append(note)
    for what in _CAUSES:
        places = found.get(what, {})
        if len(places) >= _REGULAR * len(slow):
            return tuple(note for notes in places.values() for note in notes)
    return ()
