"""``python -m headway.cli.ranks N ARGUMENTS``: torchrun on this machine, ending with the exit code of the ranks.

torchrun's own command exits with 1 whatever its ranks returned, and prints a trace of itself.
"""

import ctypes
import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from headway.cli.launcher import END

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Start the ranks, wait for them, return what the first of them to fail returned, or 0."""
    ranks, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        # When the launcher is killed outright its ranks must not train on, unseen, in its run directory.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(
            [
                "--standalone",
                f"--nproc-per-node={ranks}",
                "--local-addr=127.0.0.1",
                f"--signals-to-handle={END.name}",
                f"--log-dir={os.devnull}",  # else torchrun leaves a folder behind, and needs room for it
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
