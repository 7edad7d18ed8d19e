"""Checkpoints of a run: saved beside the run by all ranks, whole or not at all, and loaded on any number of ranks."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import headway
from headway.errors import UserError
from headway.recipe import CheckpointRecipe
from headway.train.checkpoint_manifest import (
    VALUES,
    checkpoint_path,
    checkpoints_in,
    clear_leftovers,
    hashed,
    problems,
    put_in_place,
    remove,
    write_durably,
    write_manifest,
)
from headway.train.checkpoint_reading import CheckpointReader, fill, one_line, read_values

Result = TypeVar("Result")
OnEvent = Callable[[str, dict[str, Any]], None]


class _RankError(Exception):
    """Work that one rank could not do, known to all ranks."""


class Checkpoints:
    """The checkpoints of a run in ``directory``. Made, and every method called, by all ranks together.

    A state is a nested dictionary with DTensors, tensors (the same on all ranks) and plain values that JSON can hold
    (the same on all ranks; lists hold only plain values). Joined by dots, its keys name the tensors in the checkpoint.

    ``on_event(kind, fields)`` is called on every rank, also from the saving thread, with a ``message`` in the fields:
    ``checkpoint_saved`` (step, path, bytes, seconds), ``checkpoint_failed`` (step, reason, bytes_needed, bytes_free),
    ``checkpoint_damaged`` (path, problems), ``checkpoint_removed`` (path), ``checkpoint_not_removed`` (reason),
    ``checkpoint_leftovers_cleared`` (names).

    Communicates over its own gloo group, whose collectives fail after ``timeout_s``. Saving asynchronously keeps one
    copy of this rank's shards in host memory (pinned when they come from CUDA), reused by every save.
    """

    def __init__(self, directory: Path, recipe: CheckpointRecipe, on_event: OnEvent, timeout_s: int = 600) -> None:
        self._directory = directory
        self._recipe = recipe
        self._on_event = on_event
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._staged: dict[str, torch.Tensor] = {}
        self._writer: threading.Thread | None = None
        self._whole = True
        self._damaged: set[Path] = set()
        try:
            cleared = self._on_first(self._open_directory)
        except _RankError as error:
            raise UserError(f"checkpoints can't be kept in {directory}: {error}") from error
        if cleared:
            names = [path.name for path in cleared]
            message = f"removed what a killed run left: {', '.join(names)}"
            self._tell("checkpoint_leftovers_cleared", message, {"names": names})

    def _open_directory(self) -> list[Path]:
        self._directory.mkdir(parents=True, exist_ok=True)
        return clear_leftovers(self._directory)

    # Saving

    def save(self, step: int, state: dict[str, Any], *, final: bool = False) -> float:
        """Save ``state`` as the checkpoint after ``step`` steps; gives the seconds for which training stood still.

        Asynchronous: that is the copy to host memory, and first the end of an earlier save that still runs. With
        ``final``, or with checkpoint.asynchronous off, all of it. A save that fails raises nothing: it leaves the older
        checkpoints as they are and is reported by event (``finish`` tells). Raises TypeError for a value that is
        neither tensor nor JSON.
        """
        began = time.perf_counter()
        self.finish()
        tensors, values = _split(state)
        text = json.dumps(values, indent=1)
        if final or not self._recipe.asynchronous:
            self._write(step, tensors, text)
        else:
            self._writer = threading.Thread(
                target=self._write, args=(step, self._copy_to_host(tensors), text), name=f"checkpoint of step {step}"
            )
            self._writer.start()
        return time.perf_counter() - began

    def finish(self) -> bool:
        """Wait for the save that runs; whether the last save is whole on disk (True when there was none)."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        return self._whole

    @torch.no_grad()
    def _copy_to_host(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # DCP's own stager copies each DTensor's mesh with it, which takes far longer than copying the numbers.
        for name, tensor in tensors.items():
            local = _local(tensor)
            if name not in self._staged:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                if isinstance(tensor, DTensor):
                    # from_local would move the buffer to the mesh's device.
                    buffer = DTensor(buffer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                self._staged[name] = buffer
            _local(self._staged[name]).copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {name: self._staged[name] for name in tensors}

    def _write(self, step: int, tensors: dict[str, torch.Tensor], values: str) -> None:
        began = time.perf_counter()
        needed = 0
        partial = self._directory / f".step-{step:08d}.partial"
        self._whole = False
        try:
            needed = round(sum(self._on_all(lambda: _bytes(tensors, self._world)))) + len(values)
            self._on_first(lambda: self._begin(partial, values, needed))
            save(
                tensors,
                storage_writer=FileSystemWriter(partial),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
            )
            entries = self._on_all(lambda: hashed(partial, self._own_files(partial)))
            files = {name: entry for part in entries for name, entry in sorted(part.items())}
            self._on_first(lambda: self._complete(step, partial, files))
        except (Exception, CheckpointException) as error:  # the last place where this thread can tell of it
            self._report_failure(step, error, partial, needed)
            return
        self._whole = True
        path = checkpoint_path(self._directory, step)
        size, seconds = sum(entry["size"] for entry in files.values()), time.perf_counter() - began
        fields = {"step": step, "path": str(path), "bytes": size, "seconds": seconds}
        self._tell("checkpoint_saved", f"saved {path} ({size:,} bytes)", fields)
        self._remove_old(step)

    def _begin(self, partial: Path, values: str, needed: int) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(self._directory).free
        if needed > free:
            raise OSError(f"it needs {needed:,} bytes and {free:,} are free on the disk of {self._directory}")
        partial.mkdir()
        write_durably(partial / VALUES, values)

    def _own_files(self, partial: Path) -> list[str]:
        own = [path.name for path in partial.glob(f"__{self._rank}_*")]
        return [*own, ".metadata", VALUES] if self._rank == 0 else own

    def _complete(self, step: int, partial: Path, files: dict[str, dict[str, Any]]) -> None:
        write_manifest(
            partial, {"step": step, "files": files, "headway": headway.__version__, "torch": torch.__version__}
        )
        put_in_place(partial, checkpoint_path(self._directory, step))
        self._damaged.discard(checkpoint_path(self._directory, step))

    def _report_failure(self, step: int, error: BaseException, partial: Path, needed: int) -> None:
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(self._directory).free if self._directory.exists() else 0
        reason = one_line(error)
        self._tell(
            "checkpoint_failed",
            f"the checkpoint of step {step} could not be saved: {reason}. It needs {needed:,} bytes; {free:,} are free "
            f"on the disk of {self._directory}. Older checkpoints are left as they were",
            {"step": step, "reason": reason, "bytes_needed": needed, "bytes_free": free},
        )

    def _remove_old(self, step: int) -> None:
        """Delete what the recipe does not keep, now that ``step`` is whole. Later steps belong to another run."""

        def remove_all() -> list[Path]:
            past = {n: path for n, path in checkpoints_in(self._directory).items() if n <= step}
            good = [n for n, path in past.items() if path not in self._damaged]
            keep_every = self._recipe.keep_every
            kept = {*good[-self._recipe.keep_last :], *(n for n in good if keep_every and n % keep_every == 0)}
            doomed = [path for n, path in past.items() if n not in kept]
            for path in doomed:
                remove(path)
            return doomed

        try:
            for path in self._on_first(remove_all):
                self._tell("checkpoint_removed", f"removed {path}", {"path": str(path)})
        except (_RankError, RuntimeError) as error:
            self._tell(
                "checkpoint_not_removed", f"older checkpoints could not be removed: {error}", {"reason": str(error)}
            )

    # Loading

    def newest_good(self) -> Path | None:
        """The newest checkpoint that is whole, or None; the ranks share out the reading and agree.

        Damaged ones are reported by event and passed over; the next successful save removes them.
        """
        for path in reversed(self._on_first(lambda: list(checkpoints_in(self._directory).values()))):
            parts = self._on_all(lambda path=path: problems(path, self._rank, self._world))  # type: ignore[misc]
            wrong = sorted({problem for part in parts for problem in part})
            if not wrong:
                return path
            self._damaged.add(path)
            self._tell(
                "checkpoint_damaged",
                f"the checkpoint {path.name} is damaged and passed over: {'; '.join(wrong)}",
                {"path": str(path), "problems": wrong},
            )
        return None

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Load a checkpoint into ``state`` in place: its tensors are filled, its plain values replaced or added.

        ``state`` has the tensors that were saved, sharded over these ranks in any way. Raises UserError when names,
        shapes or dtypes differ, or when the checkpoint's index refers to anything but tensors.
        """
        tensors, _ = _split(state)
        reader = CheckpointReader(path)
        self._check_fits(path, tensors, reader)
        fill(tensors, reader, self._group)
        _merge(state, read_values(path))

    def _check_fits(self, path: Path, tensors: dict[str, torch.Tensor], reader: CheckpointReader) -> None:
        """Of a pipeline's stages each has its own tensors: only together must they be all that was saved."""
        saved = sorted(reader.tensors)
        used = torch.tensor([name in tensors for name in saved], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        wrong = {f"{name} is only in the checkpoint" for name, is_used in zip(saved, used, strict=True) if not is_used}
        wrong.update(misfit for part in self._on_all(lambda: _misfits(tensors, reader)) for misfit in part)
        if wrong:
            shown = "; ".join(sorted(wrong)[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise UserError(f"{path} does not fit this run: {shown}. Resume with the recipe that it was saved by")

    # Ranks

    def _on_all(self, work: Callable[[], Result]) -> list[Result]:
        """Do ``work`` on each rank and give all results to all. Raises _RankError on all ranks when one could not."""
        try:
            outcome: tuple[Result | None, str | None] = (work(), None)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            outcome = (None, f"rank {self._rank}: {error}")
        outcomes: list[Any] = [None] * self._world
        dist.all_gather_object(outcomes, outcome, group=self._group)
        failures = [failure for _, failure in outcomes if failure]
        if failures:
            raise _RankError("; ".join(failures))
        return [result for result, _ in outcomes]

    def _on_first(self, work: Callable[[], Result]) -> Result:
        return self._on_all(lambda: work() if self._rank == 0 else None)[0]  # type: ignore[return-value]

    def _tell(self, kind: str, message: str, fields: dict[str, Any]) -> None:
        self._on_event(kind, {"message": message, **fields})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a nested state by dotted name, and the rest in the same nesting."""
    tensors: dict[str, torch.Tensor] = {}

    def rest_of(branch: dict[str, Any], prefix: str) -> dict[str, Any]:
        rest = {}
        for key, value in branch.items():
            if isinstance(value, dict):
                branch_rest = rest_of(value, f"{prefix}{key}.")
                if branch_rest or not value:
                    rest[key] = branch_rest
            elif not isinstance(value, torch.Tensor):
                rest[key] = value
            elif f"{prefix}{key}" in tensors:
                raise ValueError(f"two tensors of the state are named {prefix}{key}")
            else:
                tensors[f"{prefix}{key}"] = value.detach()
        return rest

    return tensors, rest_of(state, "")


def _merge(state: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            _merge(state[key], value)
        else:
            state[key] = value


def _misfits(tensors: dict[str, torch.Tensor], reader: CheckpointReader) -> list[str]:
    """What of this rank's tensors the checkpoint has not, or otherwise."""
    saved = reader.tensors
    wrong = [f"{name} is not in the checkpoint" for name in tensors.keys() - saved.keys()]
    for name in tensors.keys() & saved.keys():
        here = (tuple(tensors[name].shape), tensors[name].dtype)
        there = (tuple(saved[name].size), saved[name].properties.dtype)
        if here != there:
            wrong.append(f"{name} is {here} here and {there} in the checkpoint")
    return wrong


def _bytes(tensors: dict[str, torch.Tensor], world: int) -> float:
    """This rank's share of what a checkpoint takes: every element is written once, whichever ranks hold it."""
    return sum(
        tensor.numel() * tensor.element_size() / (tensor.device_mesh.size() if isinstance(tensor, DTensor) else world)
        for tensor in tensors.values()
    )
