"""Starting ranks with torchrun and passing signals on to them.

The ranks run in sessions of their own: the terminal's Ctrl-C reaches only the launcher, which tells the ranks through
the run directory. A scheduler may signal every process of a job: the ranks then hear it themselves, and torchrun, which
would end them or die of it, ignores all signals but ``END``.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from headway.runs import SIGNALS, pending_request, request_stop

END = signal.SIGHUP
"""What makes torchrun end its ranks at once: no scheduler means anything else by it."""
GRACE_S = 45.0
"""Seconds that torchrun gets to end after a second Ctrl-C, before it is killed. It kills its ranks itself, after 30;
without it they would be left behind, as they are in sessions of their own."""
LAUNCHED = "HEADWAY_LAUNCHED"
"""Environment variable of ranks that ``launch`` started: requests to stop are the launcher's to make and to clear."""
STOPPED = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that a signal stopped after saving: a scheduler may queue it again."""
INTERRUPTED = 130


def exit_code(stopped_by: str | None) -> int:
    """0 for a complete run, 130 for one stopped by Ctrl-C, 75 for one that a scheduler stopped."""
    if stopped_by is None:
        return 0
    return INTERRUPTED if stopped_by == "SIGINT" else STOPPED


def launch(ranks: int, arguments: list[str], run_directory: Path) -> int:
    """Run ``headway ARGUMENTS`` on ``ranks`` ranks of this machine and return the exit code of the run.

    ``run_directory`` exists and can be written. SIGTERM, SIGUSR1 and SIGINT ask the ranks to finish their step, save
    and end; a second SIGINT ends them at once. (Schedulers repeat themselves: a second SIGTERM must not end a save.)
    """
    environment = dict(os.environ) | {LAUNCHED: "1"}
    # torchrun would set one thread a rank, with a warning, and leave the other cores idle.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # torchrun and its ranks inherit this, so that none of them dies of a signal while it starts.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.cli.ranks", str(ranks), *arguments], env=environment, start_new_session=True
    )
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            request_stop(run_directory, signal.Signals(number).name)
        elif _at_once(asked):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, END)

    try:
        for number in SIGNALS:
            signal.signal(number, pass_on)
        code = _wait(process, asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code == 0:
        return exit_code(pending_request(run_directory))
    return INTERRUPTED if _at_once(asked) else code


def _at_once(asked: list[int]) -> bool:
    return asked.count(signal.SIGINT) > 1


def _wait(process: subprocess.Popen[bytes], asked: list[int]) -> int:
    """The exit code of the ranks; torchrun is killed when it outlives its end by ``GRACE_S``."""
    while not _at_once(asked):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
