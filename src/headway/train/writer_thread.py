"""A metrics writer on a thread of its own: neither its errors nor its server's silence reach the run."""

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from headway.train.checkpoint_reading import one_line

CALLS_KEPT = 10_000
"""Calls that may wait for a slow writer; one that is further behind is given up."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that a writer gets at the end for what still waits."""


class Writer(Protocol):
    """A place that numbers and pictures are written to."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write finite numbers of one step."""

    def picture(self, step: int, name: str, file: Path) -> None:
        """Write a picture file."""

    def close(self) -> None:
        """Flush and let go."""


class WriterThread:
    """Makes and calls a writer in the background, in order. No method raises; none but ``close`` waits.

    The first thing that goes wrong is told once by ``on_event("writer_given_up", writer=…, message=…)``, from whichever
    thread meets it; from then on the writer gets nothing.
    """

    def __init__(self, name: str, make: Callable[[], Writer], on_event: Callable[..., None]) -> None:
        self._name = name
        self._on_event = on_event
        self._calls: queue.Queue[Callable[[Writer], None] | None] = queue.Queue(CALLS_KEPT)
        self._given_up = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"{name} writer", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[Writer], None] | None) -> None:
        """Let ``call`` be made with the writer, after all earlier ones; None closes it."""
        if self._given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"it is {CALLS_KEPT:,} lines behind")

    def close(self) -> None:
        """Close the writer after its last call, or give it up after ``CLOSE_TIMEOUT_S``."""
        self.call(None)
        if not self._given_up:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._give_up(f"it has not come to its end within {CLOSE_TIMEOUT_S:.0f} s")

    def _work(self, make: Callable[[], Writer]) -> None:
        try:
            writer = make()
            while call := self._calls.get():
                call(writer)
            writer.close()
        except Exception as error:  # whatever a library or its server makes of it, the run goes on
            self._give_up(f"{type(error).__name__}: {one_line(error)}")

    def _give_up(self, reason: str) -> None:
        if self._given_up:
            return
        self._given_up = True
        message = f"{self._name} gets no more metrics ({reason}); the run goes on, and metrics.jsonl has them all"
        self._on_event("writer_given_up", writer=self._name, reason=reason, message=message)
