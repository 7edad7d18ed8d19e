"""Explanations: where the time of a run went, why, and the one change worth most."""

from headway.explain.comparison import CauseChange, Comparison, compare
from headway.explain.finding import (
    CauseClass,
    Confidence,
    Evidence,
    Explained,
    Finding,
    Fix,
    HealthMessage,
    Recoverable,
    Severity,
)
from headway.explain.input import Input, InputKind, find_inputs, kind_of
from headway.explain.page import write_page
from headway.explain.perfetto import write_perfetto
from headway.explain.rank_trace import RankTrace
from headway.explain.report import Report, explain
from headway.explain.timelines import explain_timelines

__all__ = [
    "CauseChange",
    "CauseClass",
    "Comparison",
    "Confidence",
    "Evidence",
    "Explained",
    "Finding",
    "Fix",
    "HealthMessage",
    "Input",
    "InputKind",
    "RankTrace",
    "Recoverable",
    "Report",
    "Severity",
    "compare",
    "explain",
    "explain_timelines",
    "find_inputs",
    "kind_of",
    "write_page",
    "write_perfetto",
]
