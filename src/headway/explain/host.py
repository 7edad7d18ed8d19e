"""What the host did, told by the names of its events: as intervals by cause."""

import re
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from headway.timeline import Intervals, Kind, Timeline
from headway.timeline.host_device import RUNS, WAITS
from headway.timeline.intervals import Mask


class HostCause(StrEnum):
    """What keeps a host from launching, in the order in which an instant that several cover is given to one."""

    PROFILER = "profiler"
    CHECKPOINT = "checkpoint"
    GARBAGE_COLLECTION = "garbage_collection"
    COMPILE = "compile"
    DATA = "data_wait"


NAMES: dict[HostCause, re.Pattern[str]] = {
    HostCause.CHECKPOINT: re.compile(
        r"\b(save|write|saving)_?(model_?)?(state_?)?(checkpoint|dict)"
        r"|checkpoint(er|ing|manager)?[.:_ ]*(save|saving|write)"
        r"|\bdcp\.(async_)?save|torch\.save\b|serialization\.py\(\d+\): save",
        re.I,
    ),
    HostCause.GARBAGE_COLLECTION: re.compile(r"\bPython GC\b|\bgc\.collect\b|built-in function collect>", re.I),
    HostCause.COMPILE: re.compile(
        r"entire_(frame|backward)_compile|compile_inner|backend_compile|inductor_compile|compile_fx|call_user_compiler"
        r"|aot_(dispatch|autograd)\w*compile|async_compile|TritonCompile|triton.*autotun|CachingAutotuner\.benchmark",
        re.I,
    ),
    HostCause.DATA: re.compile(
        r"enumerate\(DataLoader\)|DataLoaderIter\.__next__|\b(load|next|get|fetch|wait_for|read)_(next_)?(train_)?batch\b"
        r"|\bdata_?(load(er|ing)?|wait|fetch)\b|\bdataloader\b",
        re.I,
    ),
}
SYNCHRONISES = re.compile(
    r"^(cuda|hip|cu)(Stream|Device|Event|Ctx|Context)Synchronize|^(cuda|hip)Memcpy(2D|3D)?$|^hipMemcpyWithStream$"
    rf"|^(cuda|hip)Free$|^({RUNS}|{WAITS})$"
)
"""Runtime calls in which the host waits for the device, as ``cudaFree`` does for all of it, and a CPU for itself."""
_TO_PAGEABLE = re.compile(r"Memcpy DtoH .*Pageable|CopyDeviceToHost.*Pageable", re.I)
LAUNCHES_KERNEL = re.compile(r"^(cuda|cu|hip)\w*Launch\w*(Kernel|Grid)")


def named(timeline: Timeline, pattern: re.Pattern[str], *kinds: Kind) -> Mask:
    """Which spans of ``kinds`` (of all, when none is given) have a name in which ``pattern`` is found."""
    found = np.array([bool(text and pattern.search(text)) for text in timeline.strings], dtype=bool)
    mask: Mask = found[timeline.name]
    return mask & timeline.kinds(*kinds) if kinds else mask


def host_intervals(timeline: Timeline, cause: HostCause) -> Intervals:
    """When the host was busy with ``cause``."""
    if cause is HostCause.PROFILER:
        return timeline.intervals(timeline.kinds(Kind.OVERHEAD))
    kinds = (Kind.ANNOTATION, Kind.OPERATOR, Kind.PYTHON, Kind.OTHER)
    return timeline.intervals(named(timeline, NAMES[cause], *kinds))


def blocking_calls(timeline: Timeline, launches: NDArray[np.int64]) -> Mask:
    """Runtime calls in which the host waits for the device: synchronisations, and copies to memory that is not pinned.

    ``launches``: int64, ``[spans]``, as :func:`headway.timeline.launches_of` gives them.
    """
    blocks = named(timeline, SYNCHRONISES, Kind.RUNTIME)
    copies = np.flatnonzero(named(timeline, _TO_PAGEABLE, Kind.MEMORY))
    calls = launches[copies]
    blocks[calls[calls >= 0]] = True
    return blocks
