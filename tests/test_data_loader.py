"""The loader: one global stream of samples, whatever the ranks and workers; corrupt records keep their place."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_files import recipe, write_image_folder
from headway.data import BadRecord, Batch, Loader, Sample, SampleOrder, normal, open_sources
from headway.errors import UserError
from headway.recipe import accumulation

SIZE = 23


@dataclass(frozen=True)
class Numbers:
    """Record i is an image full of i; records in ``corrupt`` cannot be read, the one in ``deadly`` kills its reader."""

    corrupt: frozenset[int] = frozenset()
    deadly: int | None = None
    captions: None = None
    fingerprint: str = field(default="numbers")

    def __len__(self) -> int:
        return SIZE

    def read(self, index: int, epoch: int) -> Sample:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.corrupt:
            raise BadRecord(f"record {index}", "corrupt")
        return Sample(image=torch.full((3, 1, 1), index, dtype=torch.uint8), skipped=("part",) if index == 5 else ())

    def blank(self) -> Sample:
        return Sample(image=torch.zeros(3, 1, 1, dtype=torch.uint8))


def collate(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    noise = [normal((2,), seed=0, stream="noise", position=position, step=step) for position in positions]
    return {
        "image": torch.stack([sample.image for sample in samples if sample.image is not None]),
        "noise": torch.stack(noise),
        "step": torch.full((len(samples),), step),
        "weight": torch.full((len(samples),), 2.0),
    }


def not_finite(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((len(samples),), float("nan"))}


def loader(source: Numbers | None = None, **changes: object) -> Loader:
    settings = {"global_batch": 8, "micro_batch": 2, "steps": range(10), "order": SampleOrder(SIZE, 3, True), **changes}
    return Loader(source or Numbers(), changes.pop("collate", collate), **settings)  # type: ignore[arg-type]


Row = tuple[int, int, int, float, float]


def rows(batches: list[Batch]) -> list[Row]:
    """(position, step, record, first noise, weight) of each sample."""
    return [
        (position, int(step), int(image[0]), float(noise[0]), float(weight))
        for batch in batches
        for position, step, image, noise, weight in zip(
            batch.positions, *(batch.tensors[name] for name in ("step", "image", "noise", "weight")), strict=True
        )
    ]


def global_stream(ranks: int, **changes: object) -> list[Row]:
    """All ranks' samples, step by step, ordered by position within a step."""
    loaders = [loader(data_rank=rank, data_world=ranks, **changes) for rank in range(ranks)]
    steps = [sorted(row for batches in step for row in rows(batches)) for step in zip(*loaders, strict=True)]
    return [row for step in steps for row in step]


EXPECTED = global_stream(1)


def test_the_stream_is_the_order_of_the_seed():
    order = SampleOrder(SIZE, 3, True)
    assert [row[0] for row in EXPECTED] == list(range(80))
    assert [row[1] for row in EXPECTED] == [position // 8 for position in range(80)]
    assert [row[2] for row in EXPECTED] == [order.record(position)[1] for position in range(80)]


@pytest.mark.parametrize(("ranks", "micro", "workers"), [(1, 8, 0), (2, 4, 0), (4, 1, 0), (1, 2, 2), (2, 2, 1)])
def test_ranks_micro_batches_and_workers_leave_the_global_stream_as_it_is(ranks, micro, workers):
    assert global_stream(ranks, micro_batch=micro, workers=workers) == EXPECTED


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.integers(1, 4),
    micro=st.integers(1, 3),
    accumulated=st.integers(1, 3),
    start=st.integers(0, 60),
    step=st.integers(0, 5),
)
def test_micro_batches_take_the_documented_positions(ranks, micro, accumulated, start, step):
    batch = ranks * micro * accumulated
    for rank in range(ranks):
        made = loader(
            global_batch=batch,
            micro_batch=micro,
            data_rank=rank,
            data_world=ranks,
            steps=range(step, step + 2),
            start_position=start,
        )
        for number, batches in enumerate(made):
            starts = [start + number * batch + (m * ranks + rank) * micro for m in range(accumulated)]
            assert [b.positions for b in batches] == [list(range(first, first + micro)) for first in starts]


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_twice_in_a_row_goes_on_exactly(workers):
    first = global_stream(1, steps=range(3), workers=workers)
    second = global_stream(2, steps=range(3, 4), start_position=3 * 8, workers=workers)
    third = global_stream(1, steps=range(4, 10), start_position=4 * 8, micro_batch=4, workers=workers)
    assert first + second + third == EXPECTED


def test_a_loader_can_be_run_through_again():
    made = loader(workers=1)
    assert [rows(step) for step in made] == [rows(step) for step in made]
    assert len(made) == 10


def test_a_corrupt_record_keeps_its_place_with_weight_zero():
    corrupt = frozenset({2, 11})
    for workers in (0, 1):
        steps = list(loader(Numbers(corrupt), workers=workers))
        batches = [batch for step in steps for batch in step]
        for row, expected in zip(rows(batches), EXPECTED, strict=True):
            is_corrupt = expected[2] in corrupt
            assert row[4] == (0.0 if is_corrupt else 2.0)
            assert row[2] == (0 if is_corrupt else expected[2])
            assert row[:2] + row[3:4] == expected[:2] + expected[3:4]
        named = [name for batch in batches for name in batch.bad_records if name != "part"]
        assert named == [f"record {row[2]}: corrupt" for row in EXPECTED if row[2] in corrupt]


def test_parts_left_out_of_a_sample_are_named_and_it_keeps_its_weight():
    batches = [batch for step in loader() for batch in step]
    assert sum(batch.bad_records.count("part") for batch in batches) == sum(row[2] == 5 for row in EXPECTED)
    assert all(row[4] == 2.0 for row in rows(batches))


def test_a_weight_that_is_not_finite_is_zero_for_a_corrupt_record():
    made = Loader(
        Numbers(frozenset({0})),
        not_finite,
        order=SampleOrder(SIZE, 0, False),
        global_batch=2,
        micro_batch=2,
        steps=range(1),
    )
    assert next(iter(made))[0].tensors["weight"].nan_to_num(7.0).tolist() == [0.0, 7.0]


def test_weights_are_one_where_the_objective_gives_none():
    made = Loader(
        Numbers(),
        lambda samples, positions, step: {},
        order=SampleOrder(SIZE, 0, False),
        global_batch=2,
        micro_batch=2,
        steps=range(1),
    )
    assert next(iter(made))[0].tensors["weight"].tolist() == [1.0, 1.0]


def test_a_batch_that_does_not_divide_names_the_keys_and_the_nearest_that_do():
    with pytest.raises(UserError, match=r"run.global_batch = 10 .* 2 x 3 = 6: set run.global_batch to 6 or 12"):
        accumulation(10, 2, 3)
    with pytest.raises(UserError, match=r"set run\.global_batch to 8,"):
        loader(global_batch=4, micro_batch=8)


@pytest.mark.timeout(60)
def test_a_worker_killed_by_the_system_is_a_clear_error_and_no_hang():
    with pytest.raises(UserError, match=r"a data worker was killed .*data.workers"):
        list(loader(Numbers(deadly=7), workers=2))


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def signalled_by_another(number: signal.Signals, processes: list[int]) -> None:
    subprocess.run(["kill", f"-{int(number)}", *map(str, processes)], check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_that_ask_the_run_to_stop_leave_its_workers_alone(number):
    """A scheduler sends them to every process of a job, in whatever a worker is doing."""
    received = []
    for step in loader(workers=2, prefetch=1):
        signalled_by_another(number, workers_of(os.getpid()))
        received += rows(step)
    assert received == EXPECTED


@dataclass(frozen=True)
class Stuck(Numbers):
    """No record is ever read."""

    def read(self, index: int, epoch: int) -> Sample:
        signal.pause()
        raise AssertionError


@pytest.mark.timeout(60)
def test_workers_that_hang_end_when_their_parent_says_so():
    """torch ends them by the very signal that they do not take from others; so does Python at the end of a process."""
    batches: Any = loader(Stuck(), workers=1)._read_ahead()
    (worker,) = workers_of(os.getpid())
    signalled_by_another(signal.SIGTERM, [worker])
    time.sleep(0.2)
    assert workers_of(os.getpid()) == [worker]
    batches._workers[0].terminate()
    batches._workers[0].join(10)
    assert batches._workers[0].exitcode == 0


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(loader(workers=1, steps=range(1)))
    assert torch.equal(torch.rand(1), expected)


def test_batches_move_and_keep_their_names():
    batch = next(iter(loader(Numbers(frozenset(range(SIZE))))))[0]
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in moved.tensors.values()} == {"meta"}
    assert (moved.positions, moved.bad_records) == (batch.positions, batch.bad_records)
    assert len(moved.bad_records) == 2


def images_of(samples: list[Sample], positions: list[int], step: int) -> dict[str, torch.Tensor]:
    return {"image": torch.stack([sample.image for sample in samples if sample.image is not None])}


def test_a_real_source_reads_the_same_in_a_worker(tmp_path):
    folder = write_image_folder(tmp_path / "pictures", 12)
    source, _ = open_sources(recipe("image_folder", folder), cache=tmp_path / "cache", tokenizer=None, seed=0)
    order = SampleOrder(len(source), 0, True)
    here, there = (
        Loader(source, images_of, order=order, global_batch=6, micro_batch=3, steps=range(4), workers=workers)
        for workers in (0, 1)
    )
    for first, second in zip(here, there, strict=True):
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.tensors["image"], other.tensors["image"])
