"""The Timeline of a simulated step: spans of devices and hosts, with the columns that a measured one has."""

from typing import Any

import numpy as np

from headway.rehearse.columns import Integers
from headway.rehearse.durations import HOST_COPIES
from headway.rehearse.program import Program
from headway.rehearse.simulate import RankTimes, Simulation
from headway.timeline import Kind, Timeline, concatenate

HOST_LANE = "host"
LAUNCH = "launch"
NAMES = {"shard": "dp_shard"}
"""Mesh axes as the recipe's layout calls them, where the mesh has another name for them."""


def timeline_of(simulation: Simulation) -> Timeline:
    """All simulated ranks' spans. ``correlation`` is the operator's number in its record; launches have the same.

    A collective lies on its communicator's lane, from when all its ranks have arrived; what is within another's kernel
    has no span.
    """
    return concatenate([_of_rank(times) for times in simulation.ranks])


def _of_rank(times: RankTimes) -> Timeline:
    program = times.program
    strings = dict(program.columns.strings)

    def place(text: str) -> int:
        return strings.setdefault(text, len(strings))

    parts = [_device(times, place), _launches(times, place), _waits(times, place)]
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns |= {"rank": np.int32(program.facts.rank), "step": np.int32(0)}
    return Timeline.of_columns(columns, strings, length=len(columns["start_ns"]))


def _device(times: RankTimes, place: Any) -> dict[str, Any]:
    program, columns = times.program, times.program.columns
    chosen = np.flatnonzero(program.durations.launched)
    names = np.array([place(name) for name in program.lane_names], dtype=np.int32)
    lane = names[program.lane[chosen]]
    talks = columns.communicates[chosen]
    lane[talks] = [place(name) for name in _names_of_communicators(program, chosen[talks])]
    copies = np.isin(program.lane, [n for n, name in enumerate(program.lane_names) if name.startswith(HOST_COPIES)])
    kind = np.where(copies[chosen], Kind.MEMORY, Kind.COMPUTE)
    kind[talks] = Kind.COMMUNICATION
    axes = np.array([place(NAMES.get(text, text)) for text in columns.texts], dtype=np.int32)
    return {
        "kind": kind,
        "start_ns": times.start_ns[chosen],
        "duration_ns": times.end_ns[chosen] - times.start_ns[chosen],
        "lane": lane,
        "name": columns.name[chosen],
        "module": columns.module[chosen],
        "phase": columns.phase[chosen],
        "axis": axes[columns.axis[chosen]],
        "collective": columns.collective[chosen],
        "group": columns.group[chosen],
        "bytes": program.durations.bytes_moved[chosen],
        "flops": columns.flops[chosen],
        "correlation": chosen,
    }


def _names_of_communicators(program: Program, chosen: Integers) -> list[str]:
    """The lane of each of the collectives ``chosen``: its communicator's; a message has a lane of its own."""
    columns = program.columns
    messages = np.isin(columns.collective[chosen], [columns.strings.get(kind, -1) for kind in ("send", "recv")])
    return [
        program.lane_names[lane] if message else f"communicator {columns.texts[group]}"
        for lane, group, message in zip(
            program.lane[chosen].tolist(), columns.group[chosen].tolist(), messages.tolist(), strict=True
        )
    ]


def _launches(times: RankTimes, place: Any) -> dict[str, Any]:
    """What the host does for each operator; nothing where the host itself computes."""
    program = times.program
    chosen = np.flatnonzero(program.durations.launched & (not program.on_host))
    length = round(float(program.durations.launch.value))
    return _on_host(
        place,
        start_ns=times.issued_ns[chosen] - length,
        duration_ns=np.full(len(chosen), length, dtype=np.int64),
        name=np.full(len(chosen), place(LAUNCH), dtype=np.int32),
        module=program.columns.module[chosen],
        phase=program.columns.phase[chosen],
        correlation=chosen,
    )


def _waits(times: RankTimes, place: Any) -> dict[str, Any]:
    program = times.program
    begins = []
    for epoch, began in enumerate(times.epochs_ns[:-1]):
        launched = times.issued_ns[program.epoch == epoch]
        begins.append(began if program.on_host else int(launched.max(initial=began)))
    starts = np.array(begins, dtype=np.int64)
    ends = np.array(times.epochs_ns[1:], dtype=np.int64)
    nothing = np.zeros(len(starts), dtype=np.int32)
    return _on_host(
        place,
        start_ns=starts,
        duration_ns=ends - starts,
        name=np.array([place(f"wait for {reason}") for reason in program.reasons], dtype=np.int32),
        module=nothing,
        phase=nothing,
        correlation=nothing - 1,
    )


def _on_host(place: Any, **columns: Any) -> dict[str, Any]:
    count = len(columns["start_ns"])
    empty, unknown = np.zeros(count, dtype=np.int32), np.full(count, -1, dtype=np.int64)
    return {
        "kind": np.full(count, Kind.RUNTIME),
        "lane": np.full(count, place(HOST_LANE), dtype=np.int32),
        "axis": empty,
        "collective": empty,
        "group": empty,
        "bytes": unknown,
        "flops": unknown,
        **columns,
    }
