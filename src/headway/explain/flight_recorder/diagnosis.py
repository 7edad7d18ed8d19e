"""The roots of a hang as findings: which ranks, in which collective, of which class, and what to look at next."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix
from headway.explain.flight_recorder.advice import ADVICE, HangClass
from headway.explain.flight_recorder.dump import Call, Frame
from headway.explain.flight_recorder.job import Group, Job
from headway.explain.flight_recorder.mismatch import Mismatch, mismatches_of
from headway.explain.flight_recorder.stopped import StoppedDevice, stopped_devices
from headway.explain.flight_recorder.waiting import Unfinished, Wait, roots_of, unfinished_of, waits_of

_LIBRARY = ("/torch/", "torch/distributed", "<frozen", "/site-packages/")


@dataclass(frozen=True)
class Diagnosis:
    """What the dumps of a job say of its hang."""

    roots: tuple[int, ...]
    """The ranks that keep the others waiting, the likeliest first; empty when nobody waits."""
    likely_class: str
    findings: tuple[Finding, ...]
    waits: tuple[Wait, ...]


def diagnose(job: Job) -> Diagnosis:
    """Roots, not victims: disagreements first, then devices that stopped, ranks that never came, the transport."""
    waits = waits_of(job)
    late, circle = roots_of(waits)
    # Where a rank with a dump is at fault, those without are only unknown.
    late = tuple(rank for rank in late if rank in job.dumps) or late
    named: dict[int, None] = {}
    findings, classes = [], []
    for mismatch in mismatches_of(job):
        odd = tuple(rank for rank in mismatch.odd if rank in late) or mismatch.odd
        findings.append(_mismatch(job, mismatch, odd))
        classes.append(HangClass.MISMATCH)
        named |= dict.fromkeys(odd)
    stopped = stopped_devices(job)
    for device in sorted(stopped, key=lambda device: device.rank not in late):
        wait = _telling(waits, device.rank, late)
        findings.append(_stopped(job, device, wait))
        classes.append(HangClass.DEVICE_STOPPED)
        named |= {device.rank: None}
    by_wait: dict[Wait | None, list[int]] = defaultdict(list)
    for rank in late:
        if rank not in named:
            by_wait[circle if circle and rank in circle.missing else _telling(waits, rank, late)].append(rank)
    for wait, ranks in by_wait.items():
        assert wait is not None  # a rank is late only where somebody waits for it
        for hang, those in _classes(job, ranks, wait, circle).items():
            findings.append(_late(job, hang, those, wait, waits))
            classes.append(hang)
            named |= dict.fromkeys(those)
    stuck = next((unfinished for unfinished in unfinished_of(job) if not unfinished.finished), None)
    if stuck and not findings:
        findings.append(_transport(job, stuck))
        classes.append(HangClass.TRANSPORT)
        named |= dict.fromkeys(stuck.waiting)
    return Diagnosis(tuple(named), classes[0].value if classes else "", tuple(findings), tuple(waits))


def _telling(waits: Sequence[Wait], rank: int, roots: Sequence[int]) -> Wait | None:
    """Of the waits for ``rank`` the one that concerns most roots and most of those who wait, the earliest of those."""
    those = [wait for wait in waits if rank in wait.missing]
    known = set(roots)
    return max(those, key=lambda wait: (len(known.intersection(wait.missing)), len(wait.waiting)), default=None)


def _classes(job: Job, ranks: Sequence[int], wait: Wait, circle: Wait | None) -> dict[HangClass, list[int]]:
    """Why each of ``ranks`` has not come to ``wait``."""
    inside = {rank for unfinished in unfinished_of(job) if not unfinished.finished for rank in unfinished.waiting}
    found: dict[HangClass, list[int]] = defaultdict(list)
    for rank in ranks:
        if rank not in job.dumps:
            found[HangClass.DEAD_PEER].append(rank)
        elif wait is circle:
            found[HangClass.FEWER_COLLECTIVES].append(rank)
        elif rank in inside:
            found[HangClass.TRANSPORT].append(rank)
        else:
            found[HangClass.NEVER_JOINED].append(rank)
    return found


def _late(job: Job, hang: HangClass, ranks: Sequence[int], wait: Wait, waits: Sequence[Wait]) -> Finding:
    where = _where(wait.group, wait.call, wait.sequence)
    instead = {
        HangClass.NEVER_JOINED: "No unfinished call stands in their dumps: their hosts are elsewhere.",
        HangClass.DEAD_PEER: "They left no dump.",
        HangClass.FEWER_COLLECTIVES: "They wait elsewhere, for the very ranks that wait here: they went another way.",
        HangClass.TRANSPORT: "They are inside a collective that all its members joined and none has seen finish.",
    }[hang]
    claim = (
        f"{_ranks(wait.waiting, sentence=True)} joined {where}; {_ranks(ranks)} did not. {instead} "
        f"{_followers(wait, waits, ranks)}{_purpose(wait.call)}"
    ).strip()
    evidence = [_wait_evidence(job, wait), *_elsewhere(job, hang, ranks, waits)]
    evidence += [_last_call(job, rank) for rank in ranks[:8] if rank in job.dumps]
    return _finding(job, hang, f"{_ranks(ranks, sentence=True)} never joined {where}", claim, evidence)


def _mismatch(job: Job, mismatch: Mismatch, odd: tuple[int, ...]) -> Finding:
    where = _where(mismatch.group, mismatch.call, mismatch.sequence)
    if mismatch.what == "operation":
        where = f"collective {mismatch.sequence} of {_group(mismatch.group)}"
    said = defaultdict(list)
    for rank, word in mismatch.said.items():
        said[word].append(rank)
    told = "; ".join(f"{_ranks(ranks)}: {word}" for word, ranks in list(said.items())[:6])
    skipped = f" {_ranks(odd, sentence=True)} left out {mismatch.skipped} and went on with what comes next."
    claim = f"Members of {where} disagree in {mismatch.what}: {told}.{skipped if mismatch.skipped else ''}"
    evidence = [
        Evidence(
            file=str(job.dumps[rank].path),
            events=(_event(call),),
            count=1,
            text=f"rank {rank}: {mismatch.said.get(rank, call.name)}{_stack_of(call)}",
            ranks=(rank,),
            start_us=_us(call),
            end_us=_us(call),
        )
        for rank, call in list(mismatch.calls.items())
        if rank in odd
    ]
    agreeing = [rank for rank in mismatch.calls if rank not in odd][:1]
    evidence += [
        Evidence(
            file=str(job.dumps[rank].path),
            events=(_event(mismatch.calls[rank]),),
            count=len(mismatch.calls) - len(odd),
            text=f"rank {rank}, as most: {mismatch.said.get(rank, mismatch.calls[rank].name)}"
            f"{_stack_of(mismatch.calls[rank])}",
            ranks=tuple(rank for rank in mismatch.calls if rank not in odd),
        )
        for rank in agreeing
    ]
    return _finding(
        job,
        HangClass.MISMATCH,
        f"{_ranks(odd, sentence=True)} called {where} with another {mismatch.what}",
        claim,
        evidence[:9],
    )


def _stopped(job: Job, device: StoppedDevice, wait: Wait | None) -> Finding:
    group, call = device.calls[0]
    where = _where(group, call, call.sequence)
    claim = (
        f"Rank {device.rank} reports {len(device.calls)} collectives unfinished, from {where} on, that "
        f"{_ranks(device.peers)} saw finish. All members feed such a collective, so its own device or the library's "
        "thread for it stopped; it is not waiting for anybody."
    )
    evidence = [
        Evidence(
            file=str(job.dumps[device.rank].path),
            events=tuple(dict.fromkeys(_event(call) for _, call in device.calls))[:5],
            count=len(device.calls),
            text=f"unfinished on rank {device.rank}, finished on {_ranks(device.peers)}",
            ranks=(device.rank,),
            start_us=_us(device.calls[0][1]),
            end_us=_us(device.calls[-1][1]),
        )
    ]
    if wait is not None:
        claim += f" It never joined {_where(wait.group, wait.call, wait.sequence)}, where {_ranks(wait.waiting)} wait."
        evidence.append(_wait_evidence(job, wait))
    evidence.append(_last_call(job, device.rank))
    return _finding(job, HangClass.DEVICE_STOPPED, f"The device of rank {device.rank} stopped", claim, evidence)


def _transport(job: Job, unfinished: Unfinished) -> Finding:
    where = _where(unfinished.group, unfinished.call, unfinished.sequence)
    claim = (
        f"All members joined {where}; {_ranks(unfinished.waiting)} have not seen it finish. Either the dump was taken "
        "while it ran, or the transfer itself hangs." + _purpose(unfinished.call)
    )
    evidence = [
        Evidence(
            file=str(job.dumps[unfinished.waiting[0]].path),
            events=(_event(unfinished.call),),
            count=len(unfinished.waiting),
            text=f"joined by all, unfinished on {_ranks(unfinished.waiting)}",
            ranks=unfinished.waiting[:64],
            start_us=_us(unfinished.call),
            end_us=_us(unfinished.call),
        )
    ]
    return _finding(job, HangClass.TRANSPORT, f"{where} was joined by all and does not end", claim, evidence)


def _finding(job: Job, hang: HangClass, title: str, claim: str, evidence: Sequence[Evidence]) -> Finding:
    advice = ADVICE[hang]
    confidence = advice.confidence
    if confidence is Confidence.HIGH and (job.missing_dumps or not job.members_told):
        confidence = Confidence.MEDIUM
    if len(job.missing_dumps) > len(job.dumps):
        confidence = Confidence.LOW
    return Finding(
        id=f"hang-{hang.value}",
        title=title,
        claim=claim,
        cause_class=CauseClass.HANG,
        confidence=confidence,
        evidence=tuple(evidence),
        recoverable=None,
        fix=Fix(advice.fix),
        verify=advice.verify,
        falsified_by=advice.falsified_by,
    )


def _wait_evidence(job: Job, wait: Wait) -> Evidence:
    rank = wait.waiting[0]
    return Evidence(
        file=str(job.dumps[rank].path),
        events=(_event(wait.call),),
        count=len(wait.waiting),
        text=f"{_ranks(wait.waiting)} wait in {_where(wait.group, wait.call, wait.sequence)} for "
        f"{_ranks(wait.missing)}{_stack_of(wait.call)}",
        ranks=wait.waiting[:64],
        start_us=_us(wait.call),
        end_us=_us(wait.call),
    )


def _elsewhere(job: Job, hang: HangClass, ranks: Sequence[int], waits: Sequence[Wait]) -> list[Evidence]:
    """Where those wait that went another way."""
    if hang is not HangClass.FEWER_COLLECTIVES:
        return []
    there = next((wait for wait in waits if set(wait.waiting) & set(ranks)), None)
    return [_wait_evidence(job, there)] if there else []


def _last_call(job: Job, rank: int) -> Evidence:
    dump = job.dumps[rank]
    if not dump.calls:
        return Evidence(str(dump.path), (), 0, f"rank {rank} has no call in its dump: none is unfinished", (rank,))
    call = dump.calls[-1]
    state = "finished" if call.finished else "not finished"
    text = f"rank {rank}'s last call: {call.name} {call.sequence} of group {call.group}, {state}{_stack_of(call)}"
    return Evidence(str(dump.path), (_event(call),), 1, text, (rank,), _us(call), _us(call))


def _followers(wait: Wait, waits: Sequence[Wait], ranks: Sequence[int]) -> str:
    others = sorted({rank for other in waits for rank in other.waiting} - set(wait.waiting) - set(ranks))
    return f"Waiting for those in turn: {_ranks(others)}. " if others else ""


def _purpose(call: Call) -> str:
    frame = _own_frame(call)
    return f"Called at {frame}." if frame else ""


def _stack_of(call: Call) -> str:
    frame = _own_frame(call)
    return f", called at {frame}" if frame else ""


def _own_frame(call: Call) -> Frame | None:
    """The innermost line of the program itself."""
    return next((frame for frame in call.frames if not any(part in frame.file for part in _LIBRARY)), None)


def _where(group: Group, call: Call, sequence: int) -> str:
    if call.peer is not None:
        return f"{call.name} {call.own_place}{'->' if call.name == 'send' else '<-'}{call.peer} of {_group(group)}"
    return f"{call.name} {sequence} of {_group(group)}"


def _group(group: Group) -> str:
    return f"{group}, axis {group.axis}" if group.axis else str(group)


def _event(call: Call) -> str:
    return f"{call.backend}:{call.name}" if call.backend else call.name


def _us(call: Call) -> float | None:
    return call.created_ns / 1000 if call.created_ns else None


def _ranks(ranks: Sequence[int], sentence: bool = False) -> str:
    """``rank 9``, ``ranks 8-11 and 15``; ``sentence``: at its beginning."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spelled = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(spelled) > 12:
        spelled = [*spelled[:11], f"{len(spelled) - 11} more"]
    listed = spelled[0] if len(spelled) == 1 else ", ".join(spelled[:-1]) + " and " + spelled[-1]
    word = "rank" if len(ordered) == 1 else "ranks"
    return f"{word.capitalize() if sentence else word} {listed}"
