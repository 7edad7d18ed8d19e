"""The traces behind a report, read once more for what draws them: under its ranks, with their clocks' offsets."""

from collections.abc import Iterator
from dataclasses import replace

from headway.explain.input import InputKind
from headway.explain.kineto import rank_in_name, read_rank
from headway.explain.nsys import read_ranks
from headway.explain.rank_trace import RankTrace
from headway.explain.report import Report


def traces_of(report: Report) -> Iterator[tuple[RankTrace, int]]:
    """Each trace that has a budget in ``report``, and by how many ns its clock is ahead of the first rank's.

    Of the PyTorch profiler's one is read at a time. Raises UserError when a file is gone.
    """
    ranks_in: dict[str, list[int]] = {}
    for budget in report.explained.ranks:
        ranks_in.setdefault(str(budget.get("file")), []).append(int(budget["rank"]))
    offsets = (report.explained.details.get("collectives") or {}).get("clock_offset_us", {})
    for one in report.inputs:
        ranks = ranks_in.get(str(one.path), [])
        if one.kind is not InputKind.KINETO or not ranks:
            continue
        for trace in read_rank(one.path, rank_in_name(one.path)):
            # A file of one rank may have been given another number; a file of several names them itself.
            rank = ranks[0] if len(ranks) == 1 else trace.rank
            yield replace(trace, rank=rank), round(1000 * offsets.get(str(rank), 0))
    exports = [one for one in report.inputs if one.kind is InputKind.NSYS]
    for trace in read_ranks(exports)[0] if exports else ():
        if trace.rank in ranks_in.get(trace.file, ()):
            yield trace, round(1000 * offsets.get(str(trace.rank), 0))
