"""Hangs: flight-recorder dumps of a job's ranks, and which rank keeps all others waiting."""

from headway.explain.flight_recorder.explain import explain_flight_recorder

__all__ = ["explain_flight_recorder"]
