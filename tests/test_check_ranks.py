"""Tasks on ranks of a check: how a rank fails is told, and no process is left behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from headway.check.ranks import Place, RanksFailed, joined, run_on_ranks
from headway.errors import UserError


def add_up(place: Place, number: float) -> tuple[int, float]:
    with joined(place) as ranks:
        total = torch.tensor(number * (ranks.rank + 1))
        dist.all_reduce(total)
        return os.getpid(), float(total)


def fail_on_the_last(place: Place) -> None:
    with joined(place) as ranks:
        if ranks.rank == ranks.world - 1:
            raise ValueError("the last rank does not want to")
        dist.barrier()


def refuse(place: Place, rank: int | None) -> None:
    with joined(place) as ranks:
        if rank in (None, ranks.rank):
            raise UserError("layout.tp: no")
        dist.barrier()


def hang_on_the_first(place: Place) -> None:
    with joined(place) as ranks:
        if ranks.rank == 0:
            sleep_for_long()
        dist.barrier()


def sleep_for_long() -> None:
    time.sleep(60)


def die(place: Place) -> None:
    with joined(place) as ranks:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()


def test_every_rank_does_the_task() -> None:
    results = run_on_ranks(3, add_up, 2.0, timeout_s=60)
    assert [total for _, total in results] == [12.0] * 3
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4
    assert not dist.is_initialized()


def test_the_rank_that_failed_first_is_told() -> None:
    with pytest.raises(RanksFailed, match="rank 2 of 3 failed first") as failure:
        run_on_ranks(3, fail_on_the_last, timeout_s=60)
    assert "the last rank does not want to" in str(failure.value)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_refusal_by_all_ranks_or_one_is_a_refusal(rank: int | None) -> None:
    with pytest.raises(UserError, match=r"layout\.tp: no"):
        run_on_ranks(2, refuse, rank, timeout_s=60)


def test_a_rank_that_hangs_is_shown_where_it_hangs() -> None:
    with pytest.raises(RanksFailed, match=r"did not answer in 2 s") as failure:
        run_on_ranks(2, hang_on_the_first, timeout_s=2.0)
    assert "sleep_for_long" in str(failure.value)


def test_a_rank_that_dies_is_told() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 died \(SIGSEGV\)") as failure:
        run_on_ranks(2, die, timeout_s=60)
    assert "in die" in str(failure.value)


def test_no_process_is_left_behind() -> None:
    for pid, _ in run_on_ranks(2, add_up, 1.0, timeout_s=60):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
