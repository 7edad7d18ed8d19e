"""What a span is: work of the device, or of the host, or a note about either."""

from enum import IntEnum


class Kind(IntEnum):
    """The kind of a span. The device is busy with the first three; every other kind is the host's, or a note."""

    COMPUTE = 0
    """A kernel that is not a collective."""
    COMMUNICATION = 1
    """A collective or point-to-point transfer, its waiting included."""
    MEMORY = 2
    """A copy or a fill by the device."""
    OPERATOR = 3
    """A framework operator on the host (``aten::mm``)."""
    RUNTIME = 4
    """A call of the device's runtime or driver on the host: launches, allocations, synchronisation."""
    ANNOTATION = 5
    """A named range on the host: training step, module, data loading."""
    DEVICE_ANNOTATION = 6
    """A named range as seen by the device: covers kernels, is none."""
    PYTHON = 7
    """A Python function call."""
    SYNCHRONISATION = 8
    """The device's record of a host or stream that waited: no work."""
    OVERHEAD = 9
    """The profiler's own cost."""
    OTHER = 10


DEVICE_KINDS = (Kind.COMPUTE, Kind.COMMUNICATION, Kind.MEMORY)
"""The kinds that keep the device busy."""
