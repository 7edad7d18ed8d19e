"""The Timeline: spans of a predicted or measured run as columns, what they add up to, and Chrome JSON in and out."""

from headway.timeline.breakdown import Breakdown, attributed_ns, breakdown, breakdown_of
from headway.timeline.chrome_reading import Trace, read_chrome_trace
from headway.timeline.chrome_writing import write_chrome_trace
from headway.timeline.difference import Cause, Difference, difference
from headway.timeline.intervals import Intervals
from headway.timeline.kinds import DEVICE_KINDS, Kind
from headway.timeline.kineto import RUN_FACT, run_facts
from headway.timeline.links import launches_of, steps_of
from headway.timeline.memory import Memory
from headway.timeline.scopes import DATA_RANGE, MODULE_RANGE, PASSES_RANGE
from headway.timeline.timeline import UNKNOWN, Timeline, concatenate

__all__ = [
    "DATA_RANGE",
    "DEVICE_KINDS",
    "MODULE_RANGE",
    "PASSES_RANGE",
    "RUN_FACT",
    "UNKNOWN",
    "Breakdown",
    "Cause",
    "Difference",
    "Intervals",
    "Kind",
    "Memory",
    "Timeline",
    "Trace",
    "attributed_ns",
    "breakdown",
    "breakdown_of",
    "concatenate",
    "difference",
    "launches_of",
    "read_chrome_trace",
    "run_facts",
    "steps_of",
    "write_chrome_trace",
]
