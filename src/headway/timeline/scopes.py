"""Which module and which phase of a step the host was in, by the ranges of a trace and the numbers of autograd's nodes.

A backward pass has no ranges of modules. But an operator of a forward pass carries the number that autograd's next node
gets, and a node at work carries its own: so a node belongs to the module in whose range the last forward operator of
its number began.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.timeline.kinds import Kind
from headway.timeline.timeline import UNKNOWN, Timeline

MODULE_RANGE = "module: "
"""Begins the name of a range around a module's forward pass; the module's path follows."""
PASSES_RANGE = "forward and backward passes"
"""Names the range around the passes of a step, in which loss and what is outside of all modules count as forward."""
DATA_RANGE = "data_wait"
"""Names the range in which the host waits for the next batch."""
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"

_SHARDING = re.compile(r"FSDP::(?P<what>\w+?)(?: for (?P<target>\S+)| \((?P<path>[^)]*)\))$")
"""FSDP2's ranges, which name the module whose parameters they gather or whose gradients they reduce."""
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"Optimizer\.step#")

Strings = NDArray[np.int32]


@dataclass
class _Scope:
    start: int
    end: int
    module: str
    phase: str
    """``""``: that of what it is in."""


def scopes_of(
    timeline: Timeline, sequence: NDArray[np.int64], forward_thread: NDArray[np.int64], strings: dict[str, int]
) -> tuple[Strings, Strings]:
    """Module and phase of each span of the host: places in ``strings``, which grows; int32, ``[spans]``.

    ``sequence``: autograd's number that an operator carries, -1 for none; ``forward_thread``: above 0 of an operator of
    a backward pass. Without ranges of modules in the trace nothing is known.
    """
    module, phase = (np.zeros(len(timeline), dtype=np.int32) for _ in range(2))
    texts = timeline.strings
    if not any(text.startswith((MODULE_RANGE, "FSDP::")) for text in texts):
        return module, phase
    host = timeline.kinds(Kind.OPERATOR, Kind.RUNTIME, Kind.ANNOTATION, Kind.PYTHON, Kind.OTHER)
    nodes = _named(timeline, _NODE) & timeline.kinds(Kind.OPERATOR)
    lanes = np.unique(timeline.lane[host]).tolist()
    owners: dict[int, str] = {}
    for lane in lanes:
        _note_owners(timeline, np.flatnonzero(host & (timeline.lane == lane)), nodes, sequence, forward_thread, owners)
    for lane in lanes:
        spans = np.flatnonzero(host & (timeline.lane == lane))
        begins, modules, phases = _pieces(_scopes(timeline, spans, nodes, sequence, owners))
        at = np.searchsorted(begins, timeline.start_ns[spans], side="right") - 1
        for column, values in ((module, modules), (phase, phases)):
            places = np.array([strings.setdefault(value, len(strings)) for value in values], dtype=np.int32)
            column[spans] = places[at]
    return module, phase


def _named(timeline: Timeline, begins: str) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = np.array([text.startswith(begins) for text in timeline.strings])[timeline.name]
    return mask


def _note_owners(
    timeline: Timeline,
    spans: NDArray[np.int64],
    nodes: NDArray[np.bool_],
    sequence: NDArray[np.int64],
    forward_thread: NDArray[np.int64],
    owners: dict[int, str],
) -> None:
    """Add the module of each number that forward operators of a lane carry."""
    begins, modules, _ = _pieces(_scopes(timeline, spans, nodes, sequence, {}))
    within = timeline.intervals(spans[nodes[spans]])
    numbered = spans[(sequence[spans] != UNKNOWN) & (forward_thread[spans] <= 0)]
    numbered = numbered[~within.contains(timeline.start_ns[numbered])]  # what is recomputed has numbers of its own
    numbered = numbered[np.argsort(timeline.start_ns[numbered], kind="stable")]
    at = np.searchsorted(begins, timeline.start_ns[numbered], side="right") - 1
    for number, place in zip(sequence[numbered].tolist(), at.tolist(), strict=True):
        owners[number] = modules[place]


def _scopes(
    timeline: Timeline,
    spans: NDArray[np.int64],
    nodes: NDArray[np.bool_],
    sequence: NDArray[np.int64],
    owners: Mapping[int, str],
) -> list[_Scope]:
    """The ranges and backward nodes of one lane, by start; of two that begin together the longer first."""
    kind_of = {place: scope for place, text in enumerate(timeline.strings) if (scope := _of_range(text)) is not None}
    chosen = spans[nodes[spans] | np.isin(timeline.name[spans], list(kind_of))]
    chosen = chosen[np.lexsort((-timeline.duration_ns[chosen], timeline.start_ns[chosen]))]
    found, last = [], ""
    for span in chosen.tolist():
        start = int(timeline.start_ns[span])
        end = start + int(timeline.duration_ns[span])
        if nodes[span]:
            last = owners.get(int(sequence[span]), last)  # accumulation belongs to what was before
            found.append(_Scope(start, end, last, BACKWARD))
        else:
            found.append(_Scope(start, end, *kind_of[int(timeline.name[span])]))
    return found


def _of_range(name: str) -> tuple[str, str] | None:
    """Module and phase of a range by its name; None for one that says neither."""
    if name.startswith(MODULE_RANGE):
        return name.removeprefix(MODULE_RANGE), FORWARD
    if name == PASSES_RANGE:
        return "", FORWARD
    if _OPTIMIZER.match(name):
        return "", OPTIMIZER
    if sharding := _SHARDING.match(name):
        return sharding["target"] or sharding["path"], BACKWARD if "backward" in sharding["what"] else ""
    return None


def _pieces(scopes: list[_Scope]) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Scopes, which nest, as pieces of time: where each begins, and the module and phase from there on."""
    begins, modules, phases = [-(2**63)], [""], [""]
    within: list[tuple[int, str, str]] = [(2**63 - 1, "", "")]

    def leave_until(instant: int) -> None:
        while within[-1][0] <= instant:
            end = within.pop()[0]
            add(end, within[-1][1], within[-1][2])

    def add(begin: int, module: str, phase: str) -> None:
        begins.append(begin)
        modules.append(module)
        phases.append(phase)

    for scope in scopes:
        leave_until(scope.start)
        phase = scope.phase or within[-1][2]
        if scope.phase == FORWARD and scope.module and within[-1][2] in (BACKWARD, RECOMPUTE):
            phase = RECOMPUTE
        within.append((min(scope.end, within[-1][0]), scope.module or within[-1][1], phase))
        add(scope.start, within[-1][1], phase)
    leave_until(2**63 - 2)
    return np.array(begins, dtype=np.int64), modules, phases
