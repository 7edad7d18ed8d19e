"""A task on several ranks, each a process forked from this one, which has paid for the imports.

Processes are new for each task. Kept alive they would save a tenth of a second, but DTensor's caches take a mesh for
the one of an earlier task when both look alike, with process groups that are no more, or are others by now.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from headway.errors import UserError
from headway.parallel import Ranks

GRACE_S = 3.0
"""What the other ranks get to answer when one has failed: they wait for it in a collective, or meet the same error."""
OUTPUT_SHOWN = 4000
_fork: ForkContext = multiprocessing.get_context("fork")


class RanksFailed(Exception):  # noqa: N818 - it names what happened
    """A task crashed or hung; the message has the trace of the rank that failed first."""


@dataclass(frozen=True)
class Place:
    """Where a task runs among the processes that run it."""

    rank: int
    world: int
    store: str
    """File by which the ranks find each other."""
    timeout_s: float


@dataclass(frozen=True)
class _Answer:
    kind: Literal["done", "refused", "failed"]
    content: Any
    """The result, or the message of a UserError, or the trace of another exception."""
    at: float
    """``time.monotonic``, which all processes share."""


@dataclass(frozen=True)
class _Rank:
    process: ForkProcess
    connection: Connection
    printed: Path

    def output(self, start: int = 0) -> str:
        """What it has printed from byte ``start`` on, its last words among it if it died."""
        return self.printed.read_bytes()[start:].decode(errors="replace")


def run_on_ranks(world: int, task: Callable[..., Any], *arguments: Any, timeout_s: float) -> list[Any]:
    """``task(place, *arguments)`` in ``world`` processes; each one's result in the order of ranks.

    Raises UserError when a rank does so, RanksFailed when one fails otherwise, dies, or does not answer in time. No
    process is left behind. This process must have no process group and no threads.
    """
    assert not dist.is_initialized(), "a process with a process group must not be forked"
    torch.set_num_threads(1)  # threads of this process would be missing in its children
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as folder, contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            place = Place(rank, world, str(Path(folder, "store")), timeout_s)
            ranks.append(_started(place, Path(folder, f"printed-{rank}"), task, arguments))
            stack.callback(_end, ranks[-1])
        answers = _collect(ranks, timeout_s)
        if len(answers) < world or any(answer.kind != "done" for answer in answers.values()):
            raise _failure(ranks, answers, timeout_s)
    return [answers[rank].content for rank in range(world)]


@contextlib.contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """A gloo process group of the ranks of a task, to be entered by all of them.

    After an exception it ends with the process: the first rank to fail has told so before the others fail of it.
    """
    store = dist.FileStore(place.store, place.world)
    timeout = timedelta(seconds=2 * place.timeout_s)  # the parent ends a rank that hangs, and shows where it does
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    yield Ranks(place.rank, place.world, torch.device("cpu"))
    dist.destroy_process_group()


# In the processes


def _started(place: Place, printed: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> _Rank:
    printed.touch()
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_main, args=(place, theirs, printed, task, arguments), daemon=True)
    process.start()
    theirs.close()  # else the death of the process would not close it
    return _Rank(process, ours, printed)


def _main(
    place: Place, connection: Connection, printed: Path, task: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # what was there before the fork needs no collection, which would also copy its pages
    descriptor = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, descriptor, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends its ranks
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo must not depend on how the host's name resolves
    try:
        answer = _Answer("done", task(place, *arguments), time.monotonic())
    except UserError as refusal:
        answer = _Answer("refused", str(refusal), time.monotonic())
    except BaseException:  # whatever it is, it is told to the parent
        answer = _Answer("failed", traceback.format_exc(), time.monotonic())
    connection.send(answer)
    os._exit(0)  # without the parent's handlers for its own exit


# In the parent


def _collect(ranks: list[_Rank], timeout_s: float) -> dict[int, _Answer]:
    """Answers by rank: of all, or of those that came within ``GRACE_S`` of the first failure or in time."""
    waiting = {rank.connection: number for number, rank in enumerate(ranks)}
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout_s
    failed = False
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            number = waiting.pop(connection)
            answer = _received(connection)
            if answer is not None:
                answers[number] = answer
            if not failed and (answer is None or answer.kind != "done"):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


def _received(connection: Connection) -> _Answer | None:
    """None from a process that died."""
    try:
        answer: _Answer = connection.recv()
        return answer
    except (EOFError, ConnectionResetError):
        return None


def _failure(ranks: list[_Rank], answers: dict[int, _Answer], timeout_s: float) -> Exception:
    """What to tell of a task that not every rank has done."""
    world = len(ranks)
    wrong = sorted((answer.at, rank, answer) for rank, answer in answers.items() if answer.kind != "done")
    refusals = [answer.content for _, _, answer in wrong if answer.kind == "refused"]
    if refusals:
        return UserError(refusals[0])
    silent = [number for number in range(world) if number not in answers]
    for number in silent:
        ranks[number].process.join(0.2)
        code = ranks[number].process.exitcode
        if code is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return RanksFailed(f"rank {number} of {world} died ({how})\n{ranks[number].output()[:OUTPUT_SHOWN]}")
    if wrong:
        _, first, answer = wrong[0]
        return RanksFailed(f"rank {first} of {world} failed first\n{answer.content}")
    return RanksFailed(
        f"{'ranks' if len(silent) > 1 else 'rank'} {', '.join(map(str, silent))} of {world} did not answer in "
        f"{timeout_s:g} s; rank {silent[0]} is here\n{_stack(ranks[silent[0]])}"
    )


def _stack(rank: _Rank) -> str:
    """Where a process is that hangs: faulthandler answers also inside of a collective."""
    start = rank.printed.stat().st_size
    assert rank.process.pid is not None
    os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while not rank.output(start) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = rank.output(start).splitlines()
    own = next((place for place, line in enumerate(lines) if line.endswith(" in _main")), len(lines))
    return "\n".join(lines[:own])  # below it is what this process did up to the fork


def _end(rank: _Rank) -> None:
    rank.process.kill()
    rank.process.join()
    rank.connection.close()
