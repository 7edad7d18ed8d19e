"""The report: all inputs told apart, each kind explained by its reader, and their parts made one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.explain.finding import Explained, HealthMessage, Severity
from headway.explain.flight_recorder import explain_flight_recorder
from headway.explain.input import Input, InputKind, find_inputs
from headway.explain.kineto import explain_kineto
from headway.explain.logs import explain_logs, explain_run_directories, explain_tables
from headway.explain.memory_snapshot import explain_memory_snapshot
from headway.explain.nsys import explain_nsys
from headway.explain.pipeline_events import explain_pipeline_events
from headway.explain.predictions import explain_predictions
from headway.explain.reading import side_by_side
from headway.explain.timelines import by_gain

Reader = Callable[[Sequence[Input]], Explained]

READERS: Mapping[InputKind, Reader] = {
    InputKind.KINETO: explain_kineto,
    InputKind.NSYS: explain_nsys,
    InputKind.PIPELINE_EVENTS: explain_pipeline_events,
    InputKind.FLIGHT_RECORDER: explain_flight_recorder,
    InputKind.MEMORY_SNAPSHOT: explain_memory_snapshot,
    InputKind.RUN_DIRECTORY: explain_run_directories,
    InputKind.LOG: explain_logs,
    InputKind.TABLE: explain_tables,
}
"""Who explains what, in the order of the report."""


@dataclass(frozen=True)
class Report:
    """What all inputs say together."""

    inputs: tuple[Input, ...]
    explained: Explained

    @property
    def verdict(self) -> str:
        """``sound``, ``caveats`` or ``inconclusive``, by the worst health message."""
        severities = {message.severity for message in self.explained.health}
        if Severity.FAILED in severities:
            return "inconclusive"
        return "caveats" if Severity.WARNING in severities else "sound"

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "inputs": [{"path": str(one.path), "kind": one.kind.value} for one in self.inputs],
            "health": {
                "verdict": self.verdict,
                "messages": [message.as_json() for message in self.explained.health],
            },
            "ranks": [dict(rank) for rank in self.explained.ranks],
            "findings": [finding.as_json() for finding in self.explained.findings],
            **self.explained.details,
        }


def explain(paths: Sequence[Path]) -> Report:
    """Explain what lies at ``paths``: files and folders, of one run.

    Raises UserError when there is nothing to explain or nothing of it can be read.
    """
    inputs, passed_over = find_inputs(paths)
    parts: list[Explained] = []
    unread: list[str] = []
    for kind, reader in READERS.items():
        if mine := [one for one in inputs if one.kind is kind]:
            try:
                parts.append(reader(mine))
            except UserError as error:
                unread.append(str(error))
    if not parts:
        raise UserError("\n".join(unread))
    parts.append(explain_predictions(inputs))
    told = [HealthMessage("unreadable", Severity.FAILED, text) for text in unread]
    if passed_over:
        names = ", ".join(path.name for path in passed_over[:4])
        names += ", …" if len(passed_over) > 4 else ""
        text = f"{len(passed_over)} files are nothing to explain and were passed over: {names}"
        told.append(HealthMessage("passed-over", Severity.NOTE, text))
    together = side_by_side(parts, told)
    return Report(inputs, replace(together, findings=tuple(by_gain(together.findings))))
