"""Which rank wrote which dump: by what the dump itself tells, else by the numbers in the file's name.

A dump names no rank, but every group it lists holds it, and a send or receive tells its place in a group.
"""

import re
from collections.abc import Sequence

from headway.explain.flight_recorder.dump import Dump


def ranks_of(dumps: Sequence[Dump]) -> tuple[dict[int, Dump], bool]:
    """Dumps by global rank, and whether the ranks are known; if not, they only count the files in order of name."""
    possible = [_possible_ranks(dump) for dump in dumps]
    certain = [next(iter(ranks)) if ranks is not None and len(ranks) == 1 else None for ranks in possible]
    for numbers in [*_numbers_in_names(dumps), certain]:
        chosen = [number if own is None else own for number, own in zip(numbers, certain, strict=True)]
        fits = all(
            rank is not None and (ranks is None or rank in ranks) for rank, ranks in zip(chosen, possible, strict=True)
        )
        if fits and len(set(chosen)) == len(chosen):
            return {rank: dump for rank, dump in zip(chosen, dumps, strict=True) if rank is not None}, True
    return dict(enumerate(sorted(dumps, key=lambda dump: str(dump.path)))), False


def _possible_ranks(dump: Dump) -> frozenset[int] | None:
    """Ranks that are members of every group of the dump; None when it tells of no group."""
    places = {(call.group, call.own_place) for call in dump.calls if call.own_place is not None}
    told = {dump.members[group][place] for group, place in places if place < len(dump.members.get(group, ()))}
    if len(told) == 1:
        return frozenset(told)
    groups = [frozenset(ranks) for ranks in dump.members.values()]
    return frozenset.intersection(*groups) or None if groups else None


def _numbers_in_names(dumps: Sequence[Dump]) -> list[list[int | None]]:
    """For each way to find a rank in a path (``rank_7``, then the last number, the one before, …): one per dump."""
    texts = ["/".join(dump.path.absolute().parts[-2:]) for dump in dumps]
    named = [re.findall(r"rank[-_ ]?(\d{1,7})", text, flags=re.I) for text in texts]
    numbers = [re.findall(r"\d{1,7}", text) for text in texts]
    ways: list[list[int | None]] = [[int(found[-1]) if found else None for found in named]]
    for place in range(1, 1 + max(map(len, numbers), default=0)):
        ways.append([int(found[-place]) if len(found) >= place else None for found in numbers])
    return ways
