"""Ranks that come late: who, how much the others wait, and what makes them late."""

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from headway.explain.collectives import Aligned
from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix, Recoverable
from headway.explain.pathologies.communication import less_of_spans
from headway.explain.pathologies.evidence import is_worth, percent
from headway.explain.rank_part import RankPart

BLAMED = 0.2
"""A rank with this share of the lateness is named."""
MASKED = 0.5
"""Share of communication that is waiting from which the run looks bound by communication and is not."""
FIRST = 0.5
"""Share of all lateness before the first collective from which it may be the profiler's start."""
SLOWER = 1.1
"""The same kernels take this many times as long on one device."""

_LOOK_AT = (
    "its data (sizes, padding), its host (other processes, garbage collection), its device (clocks, errors). Do not "
    "tune NCCL for it."
)
_BY_TURNS = (
    "Look at what differs between ranks from one collective to the next: work in their samples, other processes on "
    "their hosts, garbage collection. Do not tune NCCL for it."
)

Integers = NDArray[np.int64]


def find_stragglers(parts: Sequence[RankPart], aligned: Sequence[Aligned]) -> Iterator[Finding]:
    """Findings about ranks beside each other: of the sets of ranks that meet, the one that waits most for one rank."""
    late = [finding for one in aligned for finding in _late_ranks(parts, one)]
    yield from sorted(late, key=lambda finding: -finding.recoverable.share if finding.recoverable else 0)[:1]
    yield from _unequal_compute(parts)
    yield from _slow_device(parts)


def lateness_ns(aligned: Aligned) -> Integers:
    """By how much the last rank of each collective came after the median of the others: ``[collectives]``."""
    others = np.sort(aligned.start_ns, axis=1)[:, :-1]
    late: Integers = (aligned.last_arrival_ns - np.median(others, axis=1)).astype(np.int64)
    return late


def _late_ranks(parts: Sequence[RankPart], aligned: Aligned) -> Iterator[Finding]:
    late = lateness_ns(aligned)
    blame = {rank: int(late[aligned.last_rank == rank].sum()) for rank in aligned.ranks}
    total = sum(blame.values())
    window = median(part.window_us for part in parts)
    named = [rank for rank in sorted(aligned.ranks, key=lambda rank: -blame[rank]) if blame[rank] >= BLAMED * total > 0]
    if not named:
        return
    gain = _gain(parts, aligned, late, window)
    if not is_worth(gain, window):
        return
    waits = int(aligned.wait_ns.sum())
    communication = int((aligned.end_ns - aligned.start_ns).sum())
    share = waits / communication if communication else 0.0
    masked = share > MASKED
    by_turns = 2 * len(named) > len(aligned.ranks)
    who_is_late = "Ranks come late by turns" if by_turns else f"Rank {', '.join(map(str, named))} comes late"
    counts = {rank: int((aligned.last_rank == rank).sum()) for rank in aligned.ranks}
    most = sorted((rank for rank in aligned.ranks if counts[rank]), key=lambda rank: -counts[rank])
    who = ", ".join(f"rank {rank} ({counts[rank]} of {len(aligned)})" for rank in most[:6])
    yield Finding(
        id="straggler-masked-as-communication" if masked else "straggler",
        title=f"{who_is_late}; the others wait inside collectives",
        claim=(
            f"Last to arrive: {who}. {percent(share)} of the time in collectives is waiting for the last rank, "
            f"{percent(1 - share)} is transfer ({aligned.transfer_ns.sum() / 1e6:,.3f} ms)"
            + (": this run is not bound by communication." if masked else ".")
            + _why_late(parts, named)
        ),
        cause_class=CauseClass.STRAGGLER,
        confidence=Confidence.HIGH if len(aligned) >= 3 else Confidence.MEDIUM,
        evidence=tuple(_evidence(parts, aligned, rank, blame[rank]) for rank in named),
        recoverable=gain,
        fix=Fix(_BY_TURNS if by_turns else f"Look at what rank {named[0]} does before these collectives: {_LOOK_AT}"),
        verify="The last rank changes from collective to collective, and waiting falls to the scatter of arrivals.",
        falsified_by=(
            f"With rank {named[0]}'s process on another host and device the same rank number is late (then it is its "
            "data or its place in the model), or the clocks of the ranks are not those that the ends say."
        ),
    )


def _gain(parts: Sequence[RankPart], aligned: Aligned, late: Integers, window_us: float) -> Recoverable:
    """Each collective's last rank comes with the last but one (low), or with the median of the others (high).

    A first collective that holds most of the lateness may be the profiler's start: the lower bound is without it.
    """
    least = aligned.last_arrival_ns - aligned.second_last_ns()
    if len(late) > 1 and late[0] > FIRST * late.sum():
        least = np.concatenate([[0], least[1:]])
    lows, highs = [], []
    for part in parts:
        if part.rank not in aligned.ranks or part.graph is None:
            continue
        column = aligned.ranks.index(part.rank)
        waits = aligned.wait_ns[:, column]
        lows.append(part.graph.gain(less_of_spans(part, aligned.span[:, column], np.minimum(waits, least))).low_us)
        highs.append(part.graph.gain(less_of_spans(part, aligned.span[:, column], np.minimum(waits, late))).high_us)
    return Recoverable.of_window(median(lows), median(highs), window_us) if lows else Recoverable.of_window(0, 0, 0)


def _why_late(parts: Sequence[RankPart], named: Sequence[int]) -> str:
    """What the first late rank has more of than the median of the others."""
    budgets = {part.rank: part.budget for part in parts if part.budget is not None}
    mine = budgets.get(named[0])
    others = [budget for rank, budget in budgets.items() if rank != named[0]]
    if mine is None or not others:
        return ""
    told = []
    for text, value in (
        ("computes", lambda budget: budget["compute_us"]),
        ("waits for its host", lambda budget: budget["idle_by_cause_us"]["host_launch"]),
        ("waits for data", lambda budget: budget["idle_by_cause_us"]["data_wait"]),
    ):
        usual = median(value(budget) for budget in others)
        if value(mine) - usual > 0.02 * mine["window_us"]:
            told.append(f"{text} {value(mine) / 1000:,.2f} ms, the others {usual / 1000:,.2f}")
    return f" Rank {named[0]} {'; it '.join(told)}." if told else ""


def _evidence(parts: Sequence[RankPart], aligned: Aligned, rank: int, blame_ns: int) -> Evidence:
    file = next((part.file for part in parts if part.rank == rank), "")
    last = aligned.last_rank == rank
    names = sorted({aligned.key[at][1] for at in np.flatnonzero(last).tolist()})
    return Evidence(
        file,
        tuple(names[:4]),
        int(last.sum()),
        f"collectives in which rank {rank} came last, {blame_ns / 1e6:,.2f} ms after the median of the others",
        (rank,),
        int(aligned.start_ns[last].min()) / 1000,
        int(aligned.end_ns[last].max()) / 1000,
    )


def _unequal_compute(parts: Sequence[RankPart]) -> Iterator[Finding]:
    """Ranks of one role that compute for different times: batches of unequal work, experts of unequal load."""
    if len(parts) < 2:
        return
    spent = np.array([part.budget["compute_us"] / part.step_count for part in parts if part.budget is not None])
    if len(spent) != len(parts) or spent.mean() <= 0:
        return
    same_kernels = [set(part.kernel_ns) for part in parts]
    alike = len(set.intersection(*same_kernels)) >= 0.5 * max(len(set.union(*same_kernels)), 1)
    over = spent.max() / spent.mean() - 1
    window = median(part.window_us for part in parts)
    steps = median(part.step_count for part in parts)
    gain = Recoverable.of_window(0, float(spent.max() - spent.mean()) * steps, window)
    if not alike or over < 0.1 or not is_worth(gain, window):
        return
    heaviest = parts[int(spent.argmax())]
    yield Finding(
        id="unequal-compute",
        title="Ranks compute different amounts",
        claim=(
            f"Rank {heaviest.rank} computes {spent.max() / 1000:,.2f} ms a step, {percent(over)} more than the mean of "
            f"{len(parts)} ranks, with the same kernels: batches, pictures or experts are unequal."
        ),
        cause_class=CauseClass.STRAGGLER,
        confidence=Confidence.MEDIUM,
        evidence=tuple(
            Evidence(part.file, (), int(part.budget["kernels"]), f"compute {value / 1000:,.2f} ms a step", (part.rank,))
            for part, value in zip(parts, spent.tolist(), strict=True)
            if part.budget is not None
        ),
        recoverable=gain,
        fix=Fix(
            "Balance by work, not by samples: tokens squared for attention, patches for vision encoders; pack "
            "sequences; spread experts.",
            {"data.packing": True},
        ),
        verify="The spread of compute time over ranks falls below a tenth.",
        falsified_by="The ranks hold different parts of the model (pipeline stages), or one device is slower.",
    )


def _slow_device(parts: Sequence[RankPart]) -> Iterator[Finding]:
    """The same kernels, as often, take longer on one device."""
    if len(parts) < 3:
        return
    for part in parts:
        others = [one for one in parts if one is not part]
        ratios, weights = [], []
        for name, (count, spent) in part.kernel_ns.items():
            same = [one.kernel_ns[name][1] for one in others if one.kernel_ns.get(name, (0, 0))[0] == count]
            if len(same) == len(others) and min(same) > 0:
                ratios.append(spent / median(same))
                weights.append(spent)
        if len(ratios) < 5:
            continue
        # A slow device slows all that it computes: nine tenths of the time in kernels that take longer.
        order = np.argsort(ratios)
        reached = np.cumsum(np.array(weights)[order])
        tenth = float(np.array(ratios)[order][np.searchsorted(reached, 0.1 * reached[-1])])
        gain = Recoverable.of_window(0, sum(weights) / 1000 * (1 - 1 / tenth), part.window_us)
        if tenth < SLOWER or not is_worth(gain, part.window_us):
            continue
        yield Finding(
            id="slow-device",
            title=f"The device of rank {part.rank} is slower than the others",
            claim=(
                f"Nine tenths of the compute of rank {part.rank} take {tenth:.2f} times or more of what the same "
                "kernels, launched as often, take on the other ranks."
            ),
            cause_class=CauseClass.COMPUTE,
            confidence=Confidence.MEDIUM,
            evidence=(
                Evidence(
                    part.file,
                    tuple(name[:120] for name in list(part.kernel_ns)[:4]),
                    sum(count for count, _ in part.kernel_ns.values()),
                    f"{len(ratios)} kinds of kernels compared",
                    (part.rank,),
                ),
            ),
            recoverable=gain,
            fix=Fix(
                "Look at its clocks and clocks_event_reasons: power cap, temperature, ECC; replace it if it stays slow."
            ),
            verify="nvidia-smi -q -d CLOCK,PERFORMANCE shows lower clocks under load on that device.",
            falsified_by="On another device the same rank is as slow: then it is its data.",
        )
