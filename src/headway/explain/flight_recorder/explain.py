"""From the dumps of a job to its hang's roots: health of the dumps, findings, and the chain of who waits for whom."""

from collections.abc import Sequence
from typing import Any

from headway.explain.finding import Explained, HealthMessage, Severity
from headway.explain.flight_recorder.diagnosis import Diagnosis, diagnose
from headway.explain.flight_recorder.dump import Dump, read_dump
from headway.explain.flight_recorder.job import Job, job_of
from headway.explain.flight_recorder.ranks import ranks_of
from headway.explain.flight_recorder.waiting import Wait
from headway.explain.input import Input
from headway.explain.reading import read_each

_MOST_SHOWN = 200
"""Waits in the report."""


def explain_flight_recorder(inputs: Sequence[Input]) -> Explained:
    """The hang that the dumps of one job show; all inputs together are taken for one job.

    Raises UserError when no dump can be read.
    """
    dumps, health = read_each(inputs, read_dump)
    by_rank, ranks_known = ranks_of(dumps)
    job = job_of(by_rank)
    health += _health(job, ranks_known)
    diagnosis = diagnose(job)
    if not diagnosis.findings:
        health.append(_nothing_found(job))
    return Explained(health=tuple(health), findings=diagnosis.findings, details={"hang": _as_json(job, diagnosis)})


def _health(job: Job, ranks_known: bool) -> list[HealthMessage]:
    found = []
    if not ranks_known:
        text = (
            "neither the dumps nor the files' names tell which rank wrote which: ranks here count the files in order "
            "of name. Put the rank's number into each file's name"
        )
        found.append(HealthMessage("ranks-unknown", Severity.FAILED, text))
    if not job.members_told:
        text = "the dumps don't tell the members of some groups: those ranks are taken that are seen to use them"
        found.append(HealthMessage("members-unknown", Severity.WARNING, text))
    if missing := job.missing_dumps:
        text = (
            f"{len(missing)} of {len(missing) + len(job.dumps)} ranks left no dump: whether they joined a collective "
            "is not known"
        )
        found.append(HealthMessage("dumps-missing", Severity.WARNING, text, ranks=missing[:64]))
    for rank, dump in sorted(job.dumps.items()):
        if dump.malformed:
            text = f"{dump.malformed} entries of rank {rank}'s dump can't be read and are left out"
            found.append(HealthMessage("malformed-entries", Severity.WARNING, text, str(dump.path), (rank,)))
    versions = {dump.version for dump in job.dumps.values()}
    if unknown := sorted(version for version in versions if not version.startswith("2.")):
        text = (
            f"dumps of version {', '.join(unknown) or 'unknown'}: 2.0 to 2.11 are known, fields may mean something else"
        )
        found.append(HealthMessage("unknown-version", Severity.WARNING, text))
    if len(versions) > 1:
        text = f"dumps of different versions ({', '.join(sorted(versions))}): are they of one job?"
        found.append(HealthMessage("mixed-versions", Severity.WARNING, text))
    return found


def _nothing_found(job: Job) -> HealthMessage:
    calls = sum(len(dump.calls) for dump in job.dumps.values())
    text = (
        f"no rank waits for another: {calls} calls of {len(job.dumps)} ranks are in the dumps, and what is unfinished "
        "has been joined by all its members"
    )
    return HealthMessage("no-hang", Severity.NOTE, text)


def _as_json(job: Job, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "root_ranks": list(diagnosis.roots),
        "class": diagnosis.likely_class,
        "ranks_with_dump": sorted(job.dumps),
        "ranks_without_dump": list(job.missing_dumps),
        "waits": [_wait_as_json(wait) for wait in diagnosis.waits[:_MOST_SHOWN]],
        "waits_left_out": max(0, len(diagnosis.waits) - _MOST_SHOWN),
        "last_calls": {
            str(rank): _call_as_json(dump) for rank, dump in sorted(job.dumps.items()) if rank in diagnosis.roots
        },
    }


def _wait_as_json(wait: Wait) -> dict[str, Any]:
    return {
        "collective": wait.call.name,
        "group": wait.group.name,
        "description": wait.group.description,
        "axis": wait.group.axis,
        "sequence": wait.sequence,
        "waiting": list(wait.waiting),
        "missing": list(wait.missing),
        "since_ns": wait.call.created_ns,
    }


def _call_as_json(dump: Dump) -> dict[str, Any] | None:
    if not dump.calls:
        return None
    call = dump.calls[-1]
    return {
        "collective": call.name,
        "group": call.group,
        "sequence": call.sequence,
        "finished": call.finished,
        "stack": [str(frame) for frame in call.frames[:20]],
    }
