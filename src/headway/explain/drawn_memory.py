"""A rank's memory over time as a page can draw it: the highest of each short while."""

from typing import Any

import numpy as np

from headway.timeline import Memory

POINTS = 1_000


def drawn_memory(memory: Memory, origin_ns: int, length_ns: int) -> dict[str, Any] | None:
    """``{at, bytes, on_host}``: from ``at`` (ns from ``origin_ns``) to the next at most so many bytes are held.

    None where nothing was watched in the ``length_ns`` from the origin.
    """
    inside = (memory.at_ns >= origin_ns) & (memory.at_ns < origin_ns + length_ns)
    at, held = memory.at_ns[inside] - origin_ns, memory.allocated[inside]
    if not len(at):
        return None
    while_of = at * POINTS // max(length_ns, 1)
    begins = np.flatnonzero(np.append(True, while_of[1:] != while_of[:-1]))
    # What was held when a while began is held in it too.
    highest = np.maximum(np.maximum.reduceat(held, begins), held[np.maximum(begins - 1, 0)])
    return {"at": at[begins].tolist(), "bytes": highest.tolist(), "on_host": memory.on_host}
