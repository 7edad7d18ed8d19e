"""PyTorch-profiler traces, one file a rank: read and analysed in processes beside each other."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from headway.errors import UserError
from headway.explain.finding import Explained, HealthMessage, Severity
from headway.explain.input import Input
from headway.explain.rank_part import RankPart, rank_part
from headway.explain.rank_trace import RankTrace
from headway.explain.timelines import explain_parts
from headway.timeline import UNKNOWN, read_chrome_trace

WORTH_A_PROCESS_BYTES = 2 << 20
"""Files of together less are read in this process: another takes longer to start."""
_RANK_IN_NAME = re.compile(r"(?:rank|worker|gpu|node_?\d+_gpu)[-_. ]?(\d{1,6})", re.I)


def explain_kineto(inputs: Sequence[Input]) -> Explained:
    """Explain all traces of a run. Raises UserError when none can be read."""
    paths = [one.path for one in inputs]
    ranks = [rank_in_name(path) for path in paths]
    results = _each(paths, ranks)
    parts = [part for part in results if isinstance(part, RankPart)]
    unread = [HealthMessage("unreadable", Severity.FAILED, text) for text in results if isinstance(text, str)]
    if not parts:
        raise UserError("\n".join(message.text for message in unread))
    parts, told = _distinct(parts)
    explained = explain_parts(parts)
    return replace(explained, health=(*unread, *told, *explained.health))


def read_rank(path: Path, rank_of_name: int = UNKNOWN) -> list[RankTrace]:
    """The traces in one file: one, or of headway's own files one a rank.

    ``rank_of_name``: which rank it is where the file itself does not say. Raises UserError.
    """
    trace = read_chrome_trace(path)
    ranks = trace.timeline.ranks() or [UNKNOWN]
    return [
        RankTrace(
            file=str(path),
            rank=rank if rank != UNKNOWN else rank_of_name,
            timeline=trace.timeline if len(ranks) == 1 else trace.timeline.of_rank(rank),
            facts=trace.facts,
            malformed=trace.left_out["malformed"],
            truncated=trace.truncated,
            mended=trace.mended,
            memory=trace.memory,
            rank_is_known=rank != UNKNOWN or rank_of_name != UNKNOWN,
        )
        for rank in ranks
    ]


def rank_in_name(path: Path) -> int:
    """The rank in a file's name (``rank3``, ``worker7``); -1 when there is none."""
    found = _RANK_IN_NAME.findall(path.name)
    return int(found[-1]) if found else UNKNOWN


def _each(paths: Sequence[Path], ranks: Sequence[int]) -> list[RankPart | str]:
    """The parts of each file in order, or why it could not be read."""
    workers = min(len(paths), os.cpu_count() or 1)
    if workers < 2 or sum(path.stat().st_size for path in paths) < WORTH_A_PROCESS_BYTES:
        found = [_parts(path, rank) for path, rank in zip(paths, ranks, strict=True)]
    else:
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                found = list(pool.map(_parts, paths, ranks))
        except BrokenProcessPool:
            text = f"a process that read {len(paths)} traces was killed, by lack of memory it seems: give fewer at once"
            raise UserError(text) from None
    return [part for parts in found for part in parts]


def _parts(path: Path, rank_of_name: int) -> list[RankPart] | list[str]:
    try:
        return [rank_part(trace) for trace in read_rank(path, rank_of_name)]
    except UserError as error:
        return [str(error)]


def _distinct(parts: Sequence[RankPart]) -> tuple[list[RankPart], list[HealthMessage]]:
    """Every part with a rank of its own: what has none, or one that is taken, gets the next that is free."""
    taken: set[int] = set()
    distinct, told = [], []
    for part in parts:
        rank = part.rank
        if rank == UNKNOWN or rank in taken:
            rank = next(free for free in range(len(parts) + max(taken, default=0) + 2) if free not in taken)
            if part.rank != UNKNOWN:
                text = f"a second trace of rank {part.rank}; it is called rank {rank} here"
                told.append(HealthMessage("rank-twice", Severity.WARNING, text, part.file, (rank,)))
        taken.add(rank)
        distinct.append(part if rank == part.rank else renumbered(part, rank))
    return distinct, told


def renumbered(part: RankPart, rank: int) -> RankPart:
    """The same part under another rank's number."""
    return replace(
        part,
        rank=rank,
        health=tuple(replace(message, ranks=(rank,)) for message in part.health),
        budget=None if part.budget is None else {**part.budget, "rank": rank},
        findings=tuple(
            replace(finding, evidence=tuple(replace(one, ranks=(rank,)) for one in finding.evidence))
            for finding in part.findings
        ),
        collectives=None if part.collectives is None else replace(part.collectives, rank=rank),
    )
