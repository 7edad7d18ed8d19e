"""The difference of two Timelines: by how much each cause made the second longer than the first."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.timeline.breakdown import Breakdown, attributed_ns, breakdown
from headway.timeline.kinds import DEVICE_KINDS, Kind
from headway.timeline.timeline import STRING_COLUMNS, Timeline

IDLE = "idle"


@dataclass(frozen=True)
class Cause:
    """What one group of spans stands for in both Timelines (see :func:`attributed_ns`)."""

    key: tuple[str, ...]
    """The group's value in each column it is grouped by; ``("idle", "", …)`` for the time in which nothing runs."""
    before_ns: int
    after_ns: int
    before_spans: int
    after_spans: int

    @property
    def change_ns(self) -> int:
        """Longer by this; negative: shorter."""
        return self.after_ns - self.before_ns


@dataclass(frozen=True)
class Difference:
    """The difference of two Timelines of one rank each. The changes of all causes add up to that of the window."""

    before: Breakdown
    after: Breakdown
    causes: tuple[Cause, ...]
    """The largest change first, whatever its sign."""

    @property
    def change_ns(self) -> int:
        """How much longer the second window is."""
        return self.after.window_ns - self.before.window_ns


def difference(
    before: Timeline,
    after: Timeline,
    by: Sequence[str] = ("kind", "phase", "axis", "module"),
    windows: tuple[tuple[int, int], tuple[int, int]] | None = None,
) -> Difference:
    """Compare two Timelines of one rank each, their device spans grouped by columns (``kind`` and string columns).

    ``windows``: of the first and the second, in ns; None: from the first device span to the last of each. Raises
    ValueError for a column that can't be grouped by, and as :func:`breakdown`.
    """
    if unknown := set(by) - {"kind", *STRING_COLUMNS}:
        raise ValueError(f"can't group by {', '.join(sorted(unknown))}")
    sides = []
    for timeline, window in zip((before, after), windows or (None, None), strict=True):
        whole = breakdown(timeline, window)
        shares: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        shares[_idle_key(by)] = [whole.idle_ns, 0]
        for key, nanoseconds in _attributed(timeline, by, whole.window):
            shares[key][0] += nanoseconds
            shares[key][1] += 1
        sides.append((whole, shares))
    (whole_before, shares_before), (whole_after, shares_after) = sides
    causes = []
    for key in {**shares_before, **shares_after}:
        first, second = shares_before.get(key, [0, 0]), shares_after.get(key, [0, 0])
        causes.append(Cause(key, first[0], second[0], first[1], second[1]))
    causes.sort(key=lambda cause: (-abs(cause.change_ns), cause.key))
    return Difference(whole_before, whole_after, tuple(causes))


def _attributed(
    timeline: Timeline, by: Sequence[str], window: tuple[int, int]
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Key and attributed ns of each device span that runs in the window."""
    runs = timeline.kinds(*DEVICE_KINDS) & (timeline.start_ns < window[1]) & (timeline.end_ns > window[0])
    shares = attributed_ns(timeline, window)[runs].tolist()
    spans = timeline.select(runs)
    columns = [_kinds(spans) if name == "kind" else spans.text(name) for name in by]
    yield from zip(zip(*columns, strict=True), shares, strict=True)


def _kinds(timeline: Timeline) -> list[str]:
    return [Kind(kind).name.lower() for kind in timeline.kind.tolist()]


def _idle_key(by: Sequence[str]) -> tuple[str, ...]:
    return (IDLE, *[""] * (len(by) - 1))
