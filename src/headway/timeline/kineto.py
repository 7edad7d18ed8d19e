"""From the events of a PyTorch-profiler (Kineto) trace to a Timeline."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.timeline.collectives import BYTES_OF_DTYPE, collective_named, is_communication
from headway.timeline.host_device import with_host_as_device
from headway.timeline.kinds import DEVICE_KINDS, Kind
from headway.timeline.links import launches_of, steps_of
from headway.timeline.memory import MEMORY_INSTANT, MEMORY_INTEGERS
from headway.timeline.products import products_of, torch_dtype
from headway.timeline.scopes import scopes_of
from headway.timeline.timeline import UNKNOWN, Timeline
from headway.timeline.trace_events import Arguments, EventColumns, lanes_of_events

ARGUMENTS = Arguments(
    strings=("Collective name", "Process Group Name", "dtype"),
    integers=(
        "correlation",
        "External id",
        "external id",
        "bytes",
        "In msg nelems",
        "Seq",
        "Sequence number",
        "Fwd thread id",
    ),
    texts=("Input Dims", "Input type"),
    instant=MEMORY_INSTANT,
    instant_integers=MEMORY_INTEGERS,
)

KIND_OF_CATEGORY = {
    "kernel": Kind.COMPUTE,
    "gpu_memcpy": Kind.MEMORY,
    "memcpy": Kind.MEMORY,
    "gpu_memset": Kind.MEMORY,
    "memset": Kind.MEMORY,
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
    "python_function": Kind.PYTHON,
    "cuda_sync": Kind.SYNCHRONISATION,
    "overhead": Kind.OVERHEAD,
}
"""Kinds by category in lower case: the spellings since 2021. An event of another category is of kind OTHER."""

RUN_FACT = "headway"
"""The member of a trace in which ``headway train`` says what it is of: ``device``; ``axes``: the mesh axes of process
groups by their names; ``steps``, and how long they and steps that were not profiled took."""

_NO_AXIS = ("", "default_pg", "undefined")
"""Descriptions of process groups that say nothing."""
_RECORD = "record_param_comms"
"""The operator that describes a collective, and launches its kernels."""
_DESCRIPTION = ("Collective name", "Process Group Name", "dtype", "In msg nelems", "Seq")


def kineto_timeline(events: EventColumns) -> Timeline:
    """The Timeline of a trace of the PyTorch profiler.

    A kernel is communication when it is linked to a collective (by its own arguments, or by the ``record_param_comms``
    that launched it), or else when its name is of a known family.
    """
    columns, strings = events.columns, events.strings
    old_spelling = columns.pop("external id")
    if old_spelling.strides != (0,):
        columns["External id"] = np.where(columns["External id"] == UNKNOWN, old_spelling, columns["External id"])
    kind = _kinds(columns["cat"], strings)
    _describe_kernels(columns, kind, strings)
    kind[_communicates(columns, kind, strings)] = Kind.COMMUNICATION
    talks = kind == Kind.COMMUNICATION
    collective = _collectives(columns, talks, strings)
    moved = columns["In msg nelems"] * _element_bytes(columns["dtype"], strings)
    flops, factors, dtype = products_of(columns, kind, strings)
    timeline = Timeline.of_columns(
        {
            "kind": kind,
            "start_ns": columns["ts"],
            "duration_ns": columns["dur"],
            "lane": _lanes(columns, kind, strings),
            "name": columns["name"],
            "collective": collective,
            "group": columns["Process Group Name"],
            "axis": _axes(columns["Process Group Name"], strings, events.facts),
            "rank": _rank(events.facts),
            "bytes": np.where(moved > 0, moved, np.where(flops > 0, factors, columns["bytes"])),
            "flops": flops,
            "dtype": np.where(dtype > 0, dtype, _named_by_torch(columns["dtype"], strings)),
            "correlation": columns["correlation"],
            "operator": columns["External id"],
            "sequence": columns["Seq"],
        },
        strings,
        length=len(kind),
    )
    timeline = replace(timeline, step=steps_of(timeline))
    timeline = _with_scopes(timeline, columns, strings)
    run = run_facts(events.facts)
    return with_host_as_device(timeline, _axes_told(run)) if run.get("device") == "cpu" else timeline


def run_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What ``headway train`` says in a trace's facts; nothing where another wrote it."""
    found = facts.get(RUN_FACT)
    return found if isinstance(found, dict) else {}


def _kinds(category: NDArray[np.int32], strings: dict[str, int]) -> NDArray[np.int8]:
    kind_of = np.full(len(strings), Kind.OTHER, dtype=np.int8)
    for text, place in strings.items():
        kind_of[place] = KIND_OF_CATEGORY.get(text.lower(), Kind.OTHER)
    return kind_of[category]


def _describe_kernels(columns: dict[str, NDArray[Any]], kind: NDArray[np.int8], strings: dict[str, int]) -> None:
    """Copy the description of a collective to the kernels without one that its operator launched."""
    record = np.flatnonzero((kind == Kind.OPERATOR) & (columns["name"] == strings.get(_RECORD, UNKNOWN)))
    operator = columns["External id"]
    record = record[np.argsort(operator[record], kind="stable")]
    kernel = np.flatnonzero((kind == Kind.COMPUTE) & (operator != UNKNOWN) & (columns["Collective name"] == 0))
    if not len(record) or not len(kernel):
        return
    nearest = record[np.minimum(np.searchsorted(operator[record], operator[kernel]), len(record) - 1)]
    linked = operator[nearest] == operator[kernel]
    for key in _DESCRIPTION:
        columns[key] = columns[key] if columns[key].flags.writeable else columns[key].copy()
        columns[key][kernel[linked]] = columns[key][nearest[linked]]
    # Operators of old traces carry no arguments: the link alone says that the kernel communicates.
    nameless = linked & (columns["Collective name"][nearest] == 0)
    columns["Collective name"][kernel[nameless]] = strings.setdefault(_RECORD, len(strings))


def _communicates(
    columns: dict[str, NDArray[Any]], kind: NDArray[np.int8], strings: dict[str, int]
) -> NDArray[np.bool_]:
    kernel = kind == Kind.COMPUTE
    names = np.unique(columns["name"][kernel])
    texts = list(strings)
    talking = names[[is_communication(texts[name]) for name in names.tolist()]] if len(names) else names
    talks: NDArray[np.bool_] = kernel & (np.isin(columns["name"], talking) | (columns["Collective name"] != 0))
    return talks


def _collectives(
    columns: dict[str, NDArray[Any]], talks: NDArray[np.bool_], strings: dict[str, int]
) -> NDArray[np.int32]:
    """One spelling for the collective of each communication: by its description, else by its kernel's name."""
    texts = list(strings)
    collective = np.zeros(len(talks), dtype=np.int32)
    for key in ("name", "Collective name"):
        spelled = np.zeros(len(texts), dtype=np.int32)
        for place in np.unique(columns[key][talks]).tolist():
            name = collective_named(texts[place])
            spelled[place] = strings.setdefault(name, len(strings))
        found = spelled[columns[key]]
        collective = np.where(talks & (found > 0), found, collective)
    return collective


def _axes(group: NDArray[np.int32], strings: dict[str, int], facts: dict[str, Any]) -> NDArray[np.int32]:
    """The mesh axis of each collective: what its process group is described as, ``mesh_tp`` being ``tp``."""
    axis_of = np.zeros(len(strings), dtype=np.int32)
    for name, axis in (_axes_described(facts) | _axes_told(run_facts(facts))).items():
        if name in strings and strings[name] < len(axis_of):
            axis_of[strings[name]] = strings.setdefault(axis, len(strings))
    return axis_of[group]


def _axes_described(facts: dict[str, Any]) -> dict[str, str]:
    """Axes by the names of process groups, as PyTorch describes the groups that a mesh makes."""
    distributed = facts.get("distributedInfo")
    groups = distributed.get("pg_config") if isinstance(distributed, dict) else None
    found = {}
    for one in groups if isinstance(groups, list) else []:
        name, description = (one.get("pg_name"), one.get("pg_desc")) if isinstance(one, dict) else (None, None)
        if isinstance(name, str) and isinstance(description, str) and description not in _NO_AXIS:
            found[name] = description.removeprefix("mesh_")
    return found


def _axes_told(run: dict[str, Any]) -> dict[str, str]:
    axes = run.get("axes")
    return {k: v for k, v in axes.items() if isinstance(v, str)} if isinstance(axes, dict) else {}


def _named_by_torch(dtype: NDArray[np.int32], strings: dict[str, int]) -> NDArray[np.int32]:
    """Places of torch's names of dtypes in place of c10's."""
    places = np.zeros(len(strings), dtype=np.int32)
    for place in np.unique(dtype).tolist():
        places[place] = strings.setdefault(torch_dtype(list(strings)[place]), len(strings))
    return places[dtype]


def _element_bytes(dtype: NDArray[np.int32], strings: dict[str, int]) -> NDArray[np.int64]:
    """Bytes of an element, 0 where the dtype is not known."""
    size_of = np.zeros(len(strings), dtype=np.int64)
    for name, size in BYTES_OF_DTYPE.items():
        if name in strings:
            size_of[strings[name]] = size
    return size_of[dtype]


def _lanes(columns: dict[str, NDArray[Any]], kind: NDArray[np.int8], strings: dict[str, int]) -> NDArray[np.int32]:
    """Streams of the device (of each device, when the file tells of several) and threads of the host."""
    several = len(np.unique(columns["pid"][np.isin(kind, DEVICE_KINDS)])) > 1

    def stream(process: int | str, thread: int | str) -> str:
        number = str(thread).removeprefix("stream ")  # as traces of 2021 spell it
        return f"device {process} stream {number}" if several else f"stream {number}"

    lane = np.zeros(len(kind), dtype=np.int32)
    device = np.isin(kind, [*DEVICE_KINDS, Kind.DEVICE_ANNOTATION, Kind.SYNCHRONISATION])
    for spans, named in ((device, stream), (~device, lambda _, thread: f"thread {thread}")):
        lane[spans] = lanes_of_events(columns["pid"][spans], columns["tid"][spans], strings, named)
    return lane


def _with_scopes(timeline: Timeline, columns: dict[str, NDArray[Any]], strings: dict[str, int]) -> Timeline:
    """The module and phase of the host's spans, and of kernels those of their launches."""
    module, phase = scopes_of(timeline, columns["Sequence number"], columns["Fwd thread id"], strings)
    if not module.any() and not phase.any():
        return timeline
    launches = launches_of(timeline)
    launched = launches >= 0
    module[launched], phase[launched] = module[launches[launched]], phase[launches[launched]]
    return replace(timeline, module=module, phase=phase, strings=tuple(strings))


def _rank(facts: dict[str, Any]) -> int:
    distributed = facts.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    return rank if isinstance(rank, int) and 0 <= rank < 2**31 else UNKNOWN
