"""One rank's measured Timeline beside what its file says of itself: all that analysis knows of a trace.

Any reader that can make these (Kineto, Nsight Systems, a run's own Timeline) gives them to ``explain_timelines`` of
:mod:`headway.explain.timelines` and has health, budget, collectives and findings done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.timeline import Memory, Timeline


@dataclass(frozen=True)
class RankTrace:
    """What one file says of one rank."""

    file: str
    rank: int
    """The rank that the file names, or the one that was given to it; distinct among the traces of a report."""
    timeline: Timeline
    """Of this rank alone, instants on the file's own clock in ns."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the file says beside its events: ``distributedInfo``, ``deviceProperties``, …"""
    malformed: int = 0
    """Events without readable name, times or duration: left out."""
    truncated: bool = False
    """The file ends in the middle."""
    mended: bool = False
    """Some of its text was no valid JSON and was read nonetheless."""
    memory: Memory = field(default_factory=Memory.nothing)
    """What was allocated when, where the profiler watched."""
    rank_is_known: bool = True
    """The file itself names the rank."""
