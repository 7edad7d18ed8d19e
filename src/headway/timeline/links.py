"""Which host call launched which kernel, and which training step a span belongs to."""

import re

import numpy as np
from numpy.typing import NDArray

from headway.timeline.kinds import DEVICE_KINDS, Kind
from headway.timeline.timeline import UNKNOWN, Timeline

Places = NDArray[np.int64]

_STEP = re.compile(r"ProfilerStep#(\d+)$")


def launches_of(timeline: Timeline) -> Places:
    """For each span the place of the runtime call that launched it, -1 for none: int64, ``[spans]``.

    Linked by correlation. Where a correlation is used more than once (a launched graph has many kernels; counters
    wrap), the last call before the kernel counts; where the device's clock is behind, the first after it.
    """
    launched = np.full(len(timeline), -1, dtype=np.int64)
    kernel = timeline.kinds(*DEVICE_KINDS)
    linked = np.flatnonzero((timeline.kinds(Kind.RUNTIME) | kernel) & (timeline.correlation != UNKNOWN))
    if not len(linked):
        return launched
    order = linked[np.lexsort((kernel[linked], timeline.start_ns[linked], timeline.correlation[linked]))]
    correlation, call = timeline.correlation[order], ~kernel[order]
    place = np.arange(len(order))
    before = np.maximum.accumulate(np.where(call, place, -1))
    after = np.minimum.accumulate(np.where(call, place, len(order))[::-1])[::-1]
    for nearest in (np.minimum(after, len(order) - 1), np.maximum(before, 0)):
        found = kernel[order] & call[nearest] & (correlation[nearest] == correlation)
        launched[order[found]] = order[nearest[found]]
    return launched


def steps_of(timeline: Timeline) -> NDArray[np.int32]:
    """The training step of each span, -1 for none: int32, ``[spans]``.

    A host span belongs to the ``ProfilerStep#N`` range of its rank in which it starts, a kernel to that of its launch.
    """
    number_of = {place: int(found[1]) for place, text in enumerate(timeline.strings) if (found := _STEP.match(text))}
    ranges = np.flatnonzero(timeline.kinds(Kind.ANNOTATION, Kind.OPERATOR) & np.isin(timeline.name, list(number_of)))
    launched = launches_of(timeline)
    asked = np.where(launched >= 0, timeline.start_ns[launched], timeline.start_ns)
    device = timeline.kinds(*DEVICE_KINDS, Kind.DEVICE_ANNOTATION)
    steps = np.full(len(timeline), UNKNOWN, dtype=np.int32)
    for rank in timeline.ranks():
        here = ranges[timeline.rank[ranges] == rank]
        here = here[np.argsort(timeline.start_ns[here], kind="stable")]
        if not len(here):
            continue
        spans = np.flatnonzero((timeline.rank == rank) & ((launched >= 0) | ~device))
        at = np.searchsorted(timeline.start_ns[here], asked[spans], side="right") - 1
        inside = (at >= 0) & (asked[spans] < timeline.end_ns[here][at])
        numbers = np.array([number_of[name] for name in timeline.name[here].tolist()], dtype=np.int32)
        steps[spans[inside]] = numbers[at[inside]]
    return steps
