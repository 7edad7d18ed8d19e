"""From a source to the micro-batches of one data rank, step by step, read ahead by worker processes.

The only state is a position: a loader made with the position of a step yields what an unbroken one would have yielded
there, for any number of workers and data ranks.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from headway.data.order import SampleOrder
from headway.data.sample import BadRecord, Batch, Sample, UnfitSample
from headway.data.source import Source
from headway.errors import UserError
from headway.recipe import accumulation

Collate = Callable[[list[Sample], list[int], int], dict[str, torch.Tensor]]
"""(samples, their positions, step) -> tensors, samples along dimension 0. Runs in the workers: it can be pickled.

It may raise UnfitSample, and is then called again with a blank sample in that place."""


@dataclass(frozen=True)
class MicroBatch:
    """Positions [start, start + size) of one step."""

    step: int
    start: int
    size: int


class _MicroBatches(Dataset[Batch]):
    """Reads and collates micro-batches, in whichever process asks."""

    def __init__(self, source: Source, collate: Collate, order: SampleOrder) -> None:
        self.source = source
        self.collate = collate
        self.order = order

    def __getitem__(self, micro_batch: MicroBatch) -> Batch:
        positions = list(range(micro_batch.start, micro_batch.start + micro_batch.size))
        samples: list[Sample] = []
        corrupt: list[int] = []
        bad_records: list[str] = []
        for place, position in enumerate(positions):
            epoch, index = self.order.record(position)
            try:
                sample = self.source.read(index, epoch)
                bad_records.extend(sample.skipped)
            except BadRecord as bad:
                sample = self.source.blank()
                corrupt.append(place)
                bad_records.append(str(bad))
            samples.append(sample)
        tensors = self._collated(samples, positions, micro_batch.step, corrupt, bad_records)
        weight = tensors.setdefault("weight", torch.ones(len(samples), dtype=torch.float32))
        weight[corrupt] = 0.0
        return Batch(tensors, positions, bad_records)

    def _collated(
        self, samples: list[Sample], positions: list[int], step: int, corrupt: list[int], bad_records: list[str]
    ) -> dict[str, torch.Tensor]:
        """The samples' tensors; those that turn out to be unfit join the corrupt ones."""
        while True:
            try:
                return self.collate(samples, positions, step)
            except UnfitSample as unfit:
                if unfit.place in corrupt:
                    raise UserError(f"even a blank sample is unfit: {unfit.bad.reason}") from unfit
                samples[unfit.place] = self.source.blank()
                corrupt.append(unfit.place)
                bad_records.append(str(unfit.bad))


class Loader:
    """Iterating yields, for each step of ``steps``, this data rank's micro-batches in order.

    Micro-batch m of data rank r of n takes ``micro_batch`` positions from step_start + (m·n + r)·micro_batch, where
    step_start = start_position + (step - steps.start)·global_batch. Each iteration starts anew at ``start_position``.

    prefetch: steps that each worker keeps ready. pin_memory: page-locked batches, for copies that do not wait.
    Raises UserError when the batch does not divide, and while iterating when a worker process dies.
    """

    def __init__(
        self,
        source: Source,
        collate: Collate,
        *,
        order: SampleOrder,
        global_batch: int,
        micro_batch: int,
        data_rank: int = 0,
        data_world: int = 1,
        steps: range,
        start_position: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if order.size != len(source):
            raise ValueError(f"the order is of {order.size} records, the source has {len(source)}")
        self.accumulation = accumulation(global_batch, micro_batch, data_world)
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.data_rank = data_rank
        self.data_world = data_world
        self.steps = steps
        self.start_position = start_position
        self.workers = workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self._dataset = _MicroBatches(source, collate, order)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[Batch]]:
        micro_batches = self._read_ahead()
        for _ in self.steps:
            yield [_next(micro_batches) for _ in range(self.accumulation)]

    def layout(self) -> Iterator[MicroBatch]:
        """The positions of this rank's micro-batches, in the order they are used."""
        for number, step in enumerate(self.steps):
            step_start = self.start_position + number * self.global_batch
            for micro in range(self.accumulation):
                start = step_start + (micro * self.data_world + self.data_rank) * self.micro_batch
                yield MicroBatch(step, start, self.micro_batch)

    def _read_ahead(self) -> Iterator[Batch]:
        # Forked workers would warn about tokenizers' own threads, which are of no use to them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        loader = DataLoader(
            self._dataset,
            sampler=_Positions(self),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            prefetch_factor=self.prefetch * self.accumulation if self.workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # else the loader would draw from the run's own generator
        )
        with _signals_held_back():
            return iter(loader)


class _Positions:
    """The loader's layout, as a sampler that can be iterated more than once."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.loader.layout()

    def __len__(self) -> int:
        return len(self.loader.steps) * self.loader.accumulation


def _as_it_is(batch: Any) -> Any:
    return batch


# A signal to every process of a job asks the run to finish its step, for which the workers are needed.
_NOT_FOR_WORKERS = {signal.SIGINT, signal.SIGUSR1} | ({signal.SIGTERM} if sys.platform == "linux" else set())


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes and threads that start inside never get the signals that are not for workers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)  # where workers are not forked, it is not inherited
    if signal.SIGTERM in _NOT_FOR_WORKERS:
        threading.Thread(target=_end_when_the_parent_says_so, daemon=True).start()


def _end_when_the_parent_says_so() -> None:
    """torch and Python end workers that hang, and those of a process that ends, by SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def _next(micro_batches: Iterator[Batch]) -> Batch:
    try:
        return next(micro_batches)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a data worker was killed ({error}): the machine probably ran out of memory; lower data.workers or "
            "data.prefetch, or look for the out-of-memory killer in the system's log"
        ) from error
