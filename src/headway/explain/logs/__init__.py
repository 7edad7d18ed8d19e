"""Logs, tables and run directories: throughput over time, stalls, spikes, restarts, and what changes were worth."""

from headway.explain.logs.explain import explain_logs
from headway.explain.logs.run_directory import explain_run_directories
from headway.explain.logs.tuning import explain_tables

__all__ = ["explain_logs", "explain_run_directories", "explain_tables"]
