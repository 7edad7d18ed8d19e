"""A few steps of a run under PyTorch's profiler: one trace a rank, which ``headway explain`` reads."""

import contextlib
import gzip
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from threading import Thread
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from headway.parallel import Meshes, Ranks
from headway.runs import PROFILED, WARM_UP_STEPS, RunDirectory
from headway.timeline import RUN_FACT
from headway.train.module_ranges import ModuleRanges
from headway.train.throughput import forget_peak_memory

PROFILER_WARM_UP = 2
"""Steps before the profiled ones in which the profiler is on and keeps nothing: its own first steps are slow."""
SETTLED = 2
"""Steps of a session after which a step is as long as later ones, so that it can be told what the profiler adds."""
GZIP_LEVEL = 5
"""Of 1 to 9: a third of the time of 9 for a few percent more bytes."""
MEMORY_EVENTS = 200_000
"""Allocations and releases that a memory snapshot keeps, the last ones."""


def steps_to_profile(session: range, count: int, interrupts: Callable[[int], bool]) -> range:
    """Which steps of a session are profiled: ``count`` of them after its warm-up, or as many as there are.

    The first step of a session, which compiles and allocates, is never among them; so of a session of one there is
    none. ``interrupts``: whether something else runs after so many steps (a checkpoint, samples): steps without such
    are chosen where there are enough.
    """
    first = session.start + max(1, min(WARM_UP_STEPS, len(session) - count))
    begins = range(first, session.stop - count + 1)
    begin = next((one for one in begins if not any(map(interrupts, range(one, one + count)))), first)
    return range(begin, min(begin + count, session.stop))


class StepProfile:
    """Profiles the ``steps`` of a session that begins with step ``first``; it is told of the end of each step.

    A rank writes its own trace, in a thread beside the training and with no collective, under another name until it is
    whole. What goes wrong in that is told as an event and stops no run.
    """

    def __init__(
        self,
        steps: range,
        first: int,
        ranks: Ranks,
        meshes: Meshes,
        directory: RunDirectory,
        modules: ModuleRanges,
        event: Callable[..., None],
    ) -> None:
        self._steps = steps
        self._step = self._first = first
        self._warm = max(steps.start - PROFILER_WARM_UP, first)
        self._ranks = ranks
        self._axes = _axes_of(meshes)
        self._directory = directory
        self._modules = modules
        self._event = event
        self._range: record_function | None = None
        self._writer: Thread | None = None
        self._unprofiled_ns: list[int] = []
        self._profiled_ns: list[int] = []
        on_gpu = ranks.device.type == "cuda"
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            record_shapes=True,
            profile_memory=True,
            experimental_config=torch.profiler._ExperimentalConfig(record_python_gc_info=True),
        )
        self._memory = _MemoryHistory() if on_gpu else None
        self._before_step()

    def step_done(self) -> None:
        """A step has ended, and what is shown of it; what else runs between steps comes after."""
        if self._step in self._steps:
            self._profiled_ns.append(self._elapsed_ns())
            self._close_range()
            if self._step == self._steps[-1]:
                self._finish()
        elif self._first + SETTLED <= self._step < self._warm:
            self._unprofiled_ns.append(self._elapsed_ns())
        self._step += 1
        self._before_step()

    def close(self) -> None:
        """Wait for a trace that is being written; give up steps that are being profiled."""
        if self._warm <= self._step < self._steps.stop:
            if self._step < self._steps.start:
                self._profiler.start_trace()  # the profiler can't be stopped before
            self._close_range()
            self._modules.detach()
            self._profiler.stop_trace()
            self._event("profile_given_up", step=self._step, message="the run ends while it is profiled: no trace")
        if self._writer is not None:
            self._writer.join()

    def _before_step(self) -> None:
        if self._step == self._warm:
            self._remove_old_traces()
            self._profiler.prepare_trace()
        if self._step == self._steps.start:
            self._modules.attach()
            if self._memory is not None:
                self._memory.start()
            self._profiler.start_trace()
        if self._step in self._steps:
            self._range = record_function(f"ProfilerStep#{self._step}")  # as the profiler itself names them
            self._range.__enter__()
        self._began_ns = time.monotonic_ns()

    def _elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _finish(self) -> None:
        """Stop the profiler, and have its trace written."""
        self._modules.detach()
        about = {
            "device": self._ranks.device.type,
            "axes": self._axes,
            "steps": [self._steps.start, self._steps.stop],
            "step_ns": self._profiled_ns,
            "unprofiled_step_ns": self._unprofiled_ns,
        }
        self._profiler.add_metadata_json(RUN_FACT, json.dumps(about))
        self._profiler.stop_trace()
        snapshot = None if self._memory is None else self._memory.stop()
        self._writer = Thread(target=self._write, args=(snapshot,), name="profile writer")
        self._writer.start()

    def _write(self, snapshot: Any) -> None:
        file = self._directory.trace_file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _replaced(file, self._write_trace)
            if snapshot is not None:
                _replaced(self._directory.memory_file, lambda path: path.write_bytes(pickle.dumps(snapshot)))
        except OSError as error:
            message = f"{file} can't be written: {error.strerror or error}"
            self._event("profile_not_written", step=self._steps.stop, message=message)
            return
        finally:
            # What it has recorded goes at once. The rest of it is in a cycle, and this thread must not collect garbage:
            # among it may be a process group, which waits for threads that wait for this one.
            self._profiler.profiler = None
            forget_peak_memory()  # which was the profiler's
        adds = ""
        if self._unprofiled_ns:
            adds = f"; the profiler adds {fmean(self._profiled_ns) / median(self._unprofiled_ns) - 1:.1%} to a step"
        message = f"steps {self._steps.start} to {self._steps.stop - 1} are profiled in {file.parent}{adds}"
        steps = [self._steps.start, self._step]
        self._event(PROFILED, step=self._step, steps=steps, file=str(file), message=message)

    def _write_trace(self, path: Path) -> None:
        """Raises OSError, also where the profiler itself says nothing of a full disk."""
        plain = path.with_suffix("")
        try:
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", GZIP_LEVEL) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
                source.seek(max(source.tell() - 64, 0))
                if not source.read().rstrip().endswith(b"}"):
                    raise OSError("the profiler has written a part of it only")
        finally:
            plain.unlink(missing_ok=True)

    def _remove_old_traces(self) -> None:
        """Of an earlier session, perhaps of more ranks. All ranks write theirs steps later."""
        if self._ranks.is_first:
            for file in self._directory.traces.glob("*"):
                with contextlib.suppress(OSError):
                    file.unlink()


def _axes_of(meshes: Meshes) -> dict[str, str]:
    """The mesh axis of each process group that has several ranks, by the group's name."""
    size = meshes.sizes
    several = [meshes.pp, meshes.fsdp, meshes.tp]
    several += [meshes.cp] if size.cp > 1 else []
    several += [meshes.expert] if size.ep > 1 else []
    axes: dict[str, str] = {}
    for mesh in several:
        for axis in mesh.mesh_dim_names or ():
            if mesh[axis].size() > 1:
                # As the layout of a recipe calls it.
                axes.setdefault(mesh.get_group(axis).group_name, "dp_shard" if axis == "shard" else axis)
    return axes


class _MemoryHistory:
    """What CUDA's allocator does, and where in the program."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MEMORY_EVENTS)

    def stop(self) -> Any:
        """The snapshot, as plain values."""
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return snapshot


def _replaced(file: Path, write: Callable[[Path], object]) -> None:
    """``write`` to a hidden file that takes the place of ``file`` when it is whole. Raises OSError."""
    hidden = file.with_name(f".{file.name}")
    try:
        write(hidden)
        os.replace(hidden, file)
    finally:
        hidden.unlink(missing_ok=True)
