"""What an explanation consists of: health messages, budgets of ranks, findings and the evidence they rest on.

Every reader of the room speaks in these types. A reader module gives ``explain_<kind>(inputs) -> Explained`` for all
inputs of its kind at once (see :mod:`headway.explain.input`); the parts of several kinds become one report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """What a health message means for the conclusions."""

    FAILED = "failed"
    """Numbers can't be trusted: what rests on them is inconclusive."""
    WARNING = "warning"
    """Numbers hold with the caveat that the message tells."""
    NOTE = "note"


class CauseClass(StrEnum):
    """Where the cause of a finding lies."""

    DATA = "data"
    HOST = "host"
    SYNCHRONISATION = "synchronisation"
    COMMUNICATION = "communication"
    STRAGGLER = "straggler"
    PIPELINE = "pipeline"
    COMPUTE = "compute"
    MEMORY = "memory"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    PROFILER = "profiler"
    TUNING = "tuning"


class Confidence(StrEnum):
    """How well the evidence holds the claim."""

    HIGH = "high"
    """The evidence shows the cause itself."""
    MEDIUM = "medium"
    """The evidence fits this cause better than others."""
    LOW = "low"
    """The evidence fits; what would settle it is not in the files."""


@dataclass(frozen=True)
class HealthMessage:
    """What is wrong, or must be known, about an input before its numbers are believed."""

    id: str
    """Stable and short: ``missing-kernels``."""
    severity: Severity
    text: str
    """One sentence or two, with the numbers it rests on."""
    file: str = ""
    ranks: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "text": self.text,
            "file": self.file,
            "ranks": list(self.ranks),
        }


@dataclass(frozen=True)
class Evidence:
    """One thing that can be looked up in a file."""

    file: str
    events: tuple[str, ...]
    """Names as they stand in the file; at most a handful."""
    count: int
    """How many such events there are."""
    text: str = ""
    """What they show, with numbers."""
    ranks: tuple[int, ...] = ()
    start_us: float | None = None
    """First instant and last, on the file's own clock; None when the file has none."""
    end_us: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "file": self.file,
            "events": list(self.events),
            "count": self.count,
            "text": self.text,
            "ranks": list(self.ranks),
            "start_us": self.start_us,
            "end_us": self.end_us,
        }


@dataclass(frozen=True)
class Recoverable:
    """Time that goes when the cause goes, with bounds."""

    low_us: float
    high_us: float
    share: float
    """Mean of both bounds, of the time that was recorded; 0 to 1. Findings are ranked by it."""

    @staticmethod
    def of_window(low_us: float, high_us: float, window_us: float) -> "Recoverable":
        """The share is that of ``window_us``, which the bounds never exceed."""
        high = min(max(high_us, 0.0), window_us)
        low = min(max(low_us, 0.0), high)
        return Recoverable(low, high, (low + high) / 2 / window_us if window_us > 0 else 0.0)


@dataclass(frozen=True)
class Fix:
    """What to change."""

    text: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of a Headway recipe by dotted key (``data.workers: 8``), as far as it has a key for the change."""


@dataclass(frozen=True)
class Finding:
    """One cause of lost time (or of a hang, or of a peak of memory) and the change that removes it."""

    id: str
    """Stable and short: ``data-loader-stall``."""
    title: str
    claim: str
    """A sentence or two with numbers: what happens, where, and what it costs."""
    cause_class: CauseClass
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    recoverable: Recoverable | None
    """None where the gain is no time that can be told from the files (a hang, a peak of memory)."""
    fix: Fix
    verify: str
    """What to measure after the change, and what it must show."""
    falsified_by: str
    """What would show that the claim is wrong."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        gain = self.recoverable
        return {
            "id": self.id,
            "title": self.title,
            "claim": self.claim,
            "cause_class": self.cause_class.value,
            "confidence": self.confidence.value,
            "evidence": [evidence.as_json() for evidence in self.evidence],
            "recoverable": None
            if gain is None
            else {"low_us": gain.low_us, "high_us": gain.high_us, "share": gain.share},
            "fix": {"text": self.fix.text, "recipe": dict(self.fix.recipe)},
            "verify": self.verify,
            "falsified_by": self.falsified_by,
        }


@dataclass(frozen=True)
class Explained:
    """What the inputs of one kind say."""

    health: tuple[HealthMessage, ...] = ()
    ranks: tuple[dict[str, Any], ...] = ()
    """The time budget of each rank as the report shows it (``rank``, ``window_us``, ``busy_us``, …)."""
    findings: tuple[Finding, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further members of the report, by name: ``collectives``, ``memory``, ``hang``. Plain values for JSON."""
