"""Explanations: where the time of a run went, why, and the one change worth most."""

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

__all__ = [
    "CauseClass",
    "Confidence",
    "Evidence",
    "Explained",
    "Finding",
    "Fix",
    "HealthMessage",
    "Input",
    "InputKind",
    "Recoverable",
    "Severity",
    "find_inputs",
    "kind_of",
]
