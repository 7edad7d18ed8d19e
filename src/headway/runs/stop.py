"""Requests to stop a run after the step at hand: signals, and a file through which the launcher tells its ranks.

A scheduler that signals ranks itself is heard too. The file stays behind a run that was stopped, and is what tells the
launcher so; the next run clears it.
"""

import contextlib
import signal
from pathlib import Path
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STOP_FILE = "stop-request"


def request_stop(directory: Path, signal_name: str) -> None:
    """Ask the ranks of the run in ``directory`` to finish their step, save and end."""
    with contextlib.suppress(OSError):  # on a full disk the file is there and empty, which says enough
        (directory / _STOP_FILE).write_text(signal_name)


def pending_request(directory: Path) -> str | None:
    """Name of the signal that a run in ``directory`` was asked to stop by, or None."""
    try:
        return (directory / _STOP_FILE).read_text().strip() or "SIGTERM"
    except FileNotFoundError:
        return None


def clear_request(directory: Path) -> None:
    """Forget a request: it was made to an earlier run, or came after the last step."""
    if directory.is_dir():
        (directory / _STOP_FILE).unlink(missing_ok=True)


class StopSignals:
    """Hears the stop signals of this process, inside its context, and the requests of the launcher."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._signal: str | None = None

    def __enter__(self) -> Self:
        """Catch the stop signals from now on; a second SIGINT ends the process as if nobody listened."""
        self._before = {number: signal.signal(number, self._caught) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number).name
        if number == signal.SIGINT:  # a person's; schedulers repeat theirs, which must not end a save
            signal.signal(number, signal.SIG_DFL)

    def pending(self) -> str | None:
        """Name of the signal, or None."""
        return self._signal or pending_request(self.directory)
