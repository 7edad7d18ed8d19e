"""``python -m headway.cli.ranks N ARGUMENTS``: torchrun on this machine, ending with the exit code of the ranks.

torchrun's own command exits with 1 whatever its ranks returned, and prints a trace of itself.
"""

import ctypes
import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Start the ranks, wait for them, return what the first of them to fail returned, or 0."""
    ranks, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        # When the launcher is killed outright its ranks must not train on, unseen, in its run directory.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # A scheduler may signal every process of a job: the ranks hear it themselves, and torchrun would die of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(
            [
                "--standalone",
                f"--nproc-per-node={ranks}",
                "--local-addr=127.0.0.1",
                "-m",
                "headway.cli.main",
                *arguments,
            ]
        )
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode < 0:
            print(f"headway: rank {rank} was ended by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 1
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
