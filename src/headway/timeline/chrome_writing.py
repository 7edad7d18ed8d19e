"""Writing a Timeline as Chrome JSON: Perfetto opens it, and :func:`read_chrome_trace` reads it back as it was."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headway.timeline.chrome_reading import OWN_ARGUMENTS, OWN_FACT
from headway.timeline.kinds import Kind
from headway.timeline.timeline import UNKNOWN, Timeline

VERSION = 1


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write ``timeline`` to ``path``; gzip when the name ends in ``.gz``.

    A rank becomes a process, a lane a thread of it. Times are us with three decimals: exact. What is not known is left
    out of an event's ``args``.
    """
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.write(f'{{"{OWN_FACT}": {VERSION}, "displayTimeUnit": "ns", "traceEvents": [\n')
        for number, event in enumerate(_events(timeline)):
            file.write(f",\n{event}" if number else event)
        file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[str]:
    quoted = [json.dumps(string) for string in timeline.strings]
    kinds = {int(kind): json.dumps(kind.name.lower()) for kind in Kind}
    yield from _names(timeline, quoted)
    ranks, lanes, names = timeline.rank.tolist(), timeline.lane.tolist(), timeline.name.tolist()
    starts, durations = timeline.start_ns.tolist(), timeline.duration_ns.tolist()
    arguments = [""] * len(timeline)
    for key in (*OWN_ARGUMENTS.strings, *OWN_ARGUMENTS.integers):
        column, is_text = getattr(timeline, key), key in OWN_ARGUMENTS.strings
        for span in np.flatnonzero(column != (0 if is_text else UNKNOWN)).tolist():
            value = quoted[column[span]] if is_text else int(column[span])
            arguments[span] += f'{", " if arguments[span] else ""}"{key}": {value}'
    for span, kind in enumerate(timeline.kind.tolist()):
        yield (
            f'{{"ph": "X", "cat": {kinds[kind]}, "name": {quoted[names[span]]}, "pid": {ranks[span]}, '
            f'"tid": {lanes[span]}, "ts": {_microseconds(starts[span])}, "dur": {_microseconds(durations[span])}, '
            f'"args": {{{arguments[span]}}}}}'
        )


def _names(timeline: Timeline, quoted: list[str]) -> Iterator[str]:
    """Metadata events that name ranks and lanes."""
    for rank in timeline.ranks():
        name = json.dumps("rank unknown" if rank == UNKNOWN else f"rank {rank}")
        yield f'{{"ph": "M", "name": "process_name", "pid": {rank}, "args": {{"name": {name}}}}}'
        for lane in np.unique(timeline.lane[timeline.rank == rank]).tolist():
            yield (
                f'{{"ph": "M", "name": "thread_name", "pid": {rank}, "tid": {lane}, '
                f'"args": {{"name": {quoted[lane]}}}}}'
            )


def _microseconds(nanoseconds: int) -> str:
    sign, size = "-" if nanoseconds < 0 else "", abs(nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"
