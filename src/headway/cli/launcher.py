"""Starting ranks with torchrun and passing signals on to them.

The ranks run in a session of their own: the terminal's Ctrl-C and a scheduler's signals reach only the launcher, which
tells the ranks through the run directory. torchrun itself would die of SIGUSR1 and end its ranks on SIGTERM.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

GRACE_S = 45.0
"""Seconds that torchrun gets to end after a second signal, before it is killed. It kills its ranks itself, after 30;
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

    The first SIGTERM, SIGUSR1 or SIGINT asks the ranks to finish their step, save and end; a second one ends them.
    """
    from headway.train import SIGNALS, pending_request, request_stop

    environment = dict(os.environ) | {LAUNCHED: "1"}
    # torchrun would set one thread a rank, with a warning, and leave the other cores idle.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.cli.ranks", str(ranks), *arguments], env=environment, start_new_session=True
    )
    asked: list[str] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) == 1 and run_directory.is_dir():
            request_stop(run_directory, asked[0])
        else:
            os.killpg(process.pid, signal.SIGTERM)

    previous = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        code = _wait(process, asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code == 0:
        return exit_code(pending_request(run_directory))
    return INTERRUPTED if "SIGINT" in asked else code


def _wait(process: subprocess.Popen[bytes], asked: list[str]) -> int:
    """The exit code of the ranks; torchrun is killed when it outlives a second signal by ``GRACE_S``."""
    while len(asked) < 2:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
