"""What a run leaves behind and is told from outside: its directory, requests to stop, its summary and console."""

from headway.runs.comparison import (
    PREDICTED,
    Compared,
    Comparison,
    compare,
    prediction_of_last_session,
    read_prediction,
)
from headway.runs.console import RunConsole
from headway.runs.json_lines import append_line, replace_text, writing
from headway.runs.run_directory import RunDirectory, read_events, read_metrics
from headway.runs.session import PROFILED, WARM_UP_STEPS, Measured, measured
from headway.runs.stop import SIGNALS, StopSignals, clear_request, pending_request, request_stop
from headway.runs.summary import RunSummary, sample_name, summarise

__all__ = [
    "PREDICTED",
    "PROFILED",
    "SIGNALS",
    "WARM_UP_STEPS",
    "Compared",
    "Comparison",
    "Measured",
    "RunConsole",
    "RunDirectory",
    "RunSummary",
    "StopSignals",
    "append_line",
    "clear_request",
    "compare",
    "measured",
    "pending_request",
    "prediction_of_last_session",
    "read_events",
    "read_metrics",
    "read_prediction",
    "replace_text",
    "request_stop",
    "sample_name",
    "summarise",
    "writing",
]
