"""A stand-in for ``torch.cuda`` whose streams and events only note which operators must have ended.

FSDP2 asks the device module for streams and events and orders its work with them. Given this one, on a machine without
an accelerator, the real FSDP2 writes down its own dependency graph: no rule of its prefetching is repeated here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.rehearse.record import COMPUTE

FSDP_STREAMS = ("fsdp copy-in", "fsdp all-gather", "fsdp reduce-scatter", "fsdp all-reduce")
"""In the order in which ``FSDPCommContext.lazy_init`` asks for them (torch 2.11 to 2.13)."""


class Stream:
    """A lane of the device: what is issued on it runs in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: int | None = None
        self._awaited: set[int] = set()

    def after(self) -> set[int]:
        """Operators that must have ended before what is issued next may begin."""
        return self._awaited if self._last is None else self._awaited | {self._last}

    def issued(self, operator: int) -> None:
        """``operator`` now runs on this stream, after all it had to wait for."""
        self._last, self._awaited = operator, set()

    def wait_for(self, operators: set[int]) -> None:
        """What is issued next waits for ``operators``."""
        self._awaited = self._awaited | operators

    def record_event(self, event: "Event | None" = None) -> "Event":
        """As torch.cuda.Stream's."""
        event = event or Event()
        event.after = self.after()
        return event

    def wait_event(self, event: "Event") -> None:
        """As torch.cuda.Stream's."""
        self.wait_for(event.after)

    def wait_stream(self, other: "Stream") -> None:
        """As torch.cuda.Stream's."""
        self.wait_for(other.after())


class Event:
    """A moment on a stream."""

    current: "Device"
    """The device whose current stream is meant where none is named."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: set[int] = set()

    def record(self, stream: Stream | None = None) -> "Event":
        """As torch.cuda.Event's; returns itself, as FSDP2 expects."""
        return (stream or Event.current.stream_now).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """As torch.cuda.Event's."""
        (stream or Event.current.stream_now).wait_event(self)

    def synchronize(self) -> None:
        """The host would wait; nothing that is recorded depends on it."""


Lane = Stream
"""Another name, for where ``Device.Stream`` hides the first one."""


class Device:
    """What FSDP2 takes for ``torch.cuda``."""

    Event = Event

    def __init__(self) -> None:
        self.stream_now = Stream(COMPUTE)
        self._made = 0
        self._communication: dict[str, Stream] = {}
        Event.current = self

    def Stream(self, priority: int = 0) -> Stream:  # noqa: N802 - torch.cuda's name
        """A new stream. Each root of FSDP2 (one a pipeline stage) asks for four."""
        root, place = divmod(self._made, len(FSDP_STREAMS))
        self._made += 1
        return Stream(FSDP_STREAMS[place] + (f" {root + 1}" if root else ""))

    def current_stream(self, *_: Any) -> Lane:
        """The stream on which operators are issued now."""
        return self.stream_now

    def current_device(self) -> int:
        """There is one device."""
        return 0

    @contextmanager
    def stream(self, stream: Lane) -> Iterator[None]:
        """Issue on ``stream`` inside the context."""
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def communication(self, name: str) -> Lane:
        """The stream of asynchronous collectives called ``name``."""
        return self._communication.setdefault(name, Stream(name))
