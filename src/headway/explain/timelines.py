"""From the traces of a run's ranks to what they say together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from headway.explain.collectives import Aligned, align, clock_offsets_ns
from headway.explain.finding import Evidence, Explained, Finding, HealthMessage, Recoverable, Severity
from headway.explain.kernels import kernels_json
from headway.explain.pathologies.communication import find_communication
from headway.explain.pathologies.stragglers import FIRST, find_stragglers, lateness_ns
from headway.explain.rank_part import RankPart, rank_part
from headway.explain.rank_trace import RankTrace

MOST_EVIDENCE = 16
"""Of one finding."""


def explain_timelines(traces: Sequence[RankTrace]) -> Explained:
    """Explain the traces of one run, one a rank, in this process."""
    return explain_parts([rank_part(trace) for trace in traces])


def explain_parts(parts: Sequence[RankPart]) -> Explained:
    """Explain a run of what its ranks say: one of each rank."""
    parts = sorted(parts, key=lambda part: part.rank)
    health = [message for part in parts for message in part.health]
    sound = [part for part in parts if part.is_conclusive]
    health += _ranks_health(sound)
    one_run = len(_world_sizes(sound)) < 2
    aligned = align([part.collectives for part in sound if part.collectives is not None]) if one_run else ()
    health += _alignment_health(aligned)
    findings = merged([finding for part in sound for finding in part.findings], len(sound))
    if sound:
        findings += find_communication(sound, aligned)
        findings += find_stragglers(sound, aligned) if one_run else ()
    return Explained(
        health=tuple(health),
        ranks=tuple(dict(part.budget) for part in parts if part.budget is not None),
        findings=tuple(by_gain(findings)),
        details={
            "kernels": kernels_json(parts),
            **({"collectives": _collectives(aligned)} if aligned else {}),
        },
    )


def _world_sizes(parts: Sequence[RankPart]) -> list[int]:
    return sorted({part.world_size for part in parts if part.world_size})


def _ranks_health(parts: Sequence[RankPart]) -> Iterator[HealthMessage]:
    """What is known only of all traces together."""
    sizes = _world_sizes(parts)
    if len(sizes) > 1:
        text = (
            f"the files are of different runs, of {', '.join(map(str, sizes))} ranks: what compares ranks is left out, "
            "and bounds over all ranks mean nothing; explain each run by itself"
        )
        yield HealthMessage("mixed-runs", Severity.FAILED, text)
        return
    world = max(sizes, default=0)
    ranks = tuple(part.rank for part in parts)
    if world > 1 and len(ranks) == 1:
        text = (
            f"one rank of {world}: its communication can't be divided into waiting for others and transfer; "
            "give the traces of all ranks"
        )
        yield HealthMessage("single-rank", Severity.WARNING, text, ranks=ranks)
    elif world > len(ranks):
        text = f"{len(ranks)} ranks of {world}: who arrived last is only known among these"
        yield HealthMessage("some-ranks", Severity.WARNING, text, ranks=ranks)


def _collectives(aligned: Sequence[Aligned]) -> dict[str, Any]:
    """The largest set of ranks that meet, the clocks of all, and the other sets."""
    first, *others = (one.as_json() for one in aligned)
    offsets = {str(rank): ns / 1000 for rank, ns in sorted(clock_offsets_ns(aligned).items())}
    return {**first, "clock_offset_us": offsets, "other_groups": others}


def _alignment_health(aligned: Sequence[Aligned]) -> Iterator[HealthMessage]:
    offset = max((abs(ns) for ns in clock_offsets_ns(aligned).values()), default=0) / 1000
    if offset:
        residual = max(int(one.residual_ns.max()) for one in aligned) / 1000
        ranks = tuple(sorted({rank for one in aligned for rank in one.ranks}))
        text = (
            f"the clocks of the ranks are up to {offset:,.1f} us apart, by the ends of "
            f"{sum(map(len, aligned))} collectives; after correction the ends still differ by up to {residual:,.1f} us"
        )
        yield HealthMessage("clock-offsets", Severity.NOTE, text, ranks=ranks)
    for one in aligned:
        late = lateness_ns(one)
        if len(one) > 1 and late[0] > FIRST * max(int(late.sum()), 1):
            text = (
                f"{late[0] / max(int(late.sum()), 1):.0%} of the lateness is before the first collective: perhaps the "
                "profiler began at different times on different ranks; lower bounds leave it out"
            )
            yield HealthMessage("late-before-the-first", Severity.NOTE, text, ranks=one.ranks)
        if one.left_out > len(one):
            text = (
                f"{one.left_out} collectives have no counterpart on all {len(one.ranks)} ranks, {len(one)} have: "
                "waiting is known of these only"
            )
            yield HealthMessage("unmatched-collectives", Severity.WARNING, text, ranks=one.ranks)


def merged(findings: Iterable[Finding], ranks: int) -> list[Finding]:
    """One finding a pathology, however many of the ``ranks`` show it.

    The ranks of a run go in step, so a gain on all of them is had once: the bounds are the lowest and the median. What
    not all ranks show gains nothing for certain.
    """
    by_id: dict[str, list[Finding]] = {}
    for finding in findings:
        by_id.setdefault(finding.id, []).append(finding)
    return [_one_of(same, ranks) for same in by_id.values()]


def by_gain(findings: Iterable[Finding]) -> list[Finding]:
    """The largest gain first; what has none that is known, last."""
    return sorted(findings, key=_worth, reverse=True)


def _one_of(same: Sequence[Finding], ranks: int) -> Finding:
    worst = max(same, key=_worth)
    if ranks == 1:
        return worst
    gains = [finding.recoverable for finding in same if finding.recoverable is not None]
    evidence: list[Evidence] = [part for finding in sorted(same, key=_worth, reverse=True) for part in finding.evidence]
    gain = None
    if gains:
        low = min(gain.low_us for gain in gains) if len(same) >= ranks else 0.0
        high = median(gain.high_us for gain in gains)
        largest = max(gains, key=lambda gain: gain.high_us)
        middle = (largest.low_us + largest.high_us) / 2
        window = middle / largest.share if largest.share else 0.0
        gain = Recoverable.of_window(low, high, window)
    rank = worst.evidence[0].ranks[0]
    where = f"On {len(same)} of {ranks} ranks; rank {rank}" if len(same) > 1 else f"On rank {rank} of {ranks} ranks"
    claim = f"{where}: {worst.claim}"
    return replace(worst, claim=claim, evidence=tuple(evidence[:MOST_EVIDENCE]), recoverable=gain)


def _worth(finding: Finding) -> float:
    return finding.recoverable.share if finding.recoverable is not None else -1.0
