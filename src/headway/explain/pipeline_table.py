"""Reading a job's table of pipeline events (parquet): one row an operation of one rank in one step."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from headway.errors import UserError
from headway.explain.pipeline_job import BACKWARD, FORWARD, Key, Operation, PipelineJob

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
"""Times are seconds; mc is the chunk of a stage, gmc that of the model, -1 for what belongs to none."""
MOST_STAGES = 4096


def read_job(path: Path) -> tuple[PipelineJob, int]:
    """The job of a table, and how many steps were left out since events of them are missing.

    Raises UserError when it is no such table or holds no whole step.
    """
    columns = _columns(path)
    sound = np.isfinite(columns["start_ts"]) & np.isfinite(columns["duration"]) & (columns["duration"] >= 0)
    if not sound.all():
        raise UserError(f"{path}: {int((~sound).sum())} events have no time or a negative duration")
    ranks, data_rank = np.unique(columns["dp_rank"], return_inverse=True)
    steps, step = np.unique(columns["step"], return_inverse=True)
    keys, operation = _operations(columns)
    shape = (len(keys), len(ranks), len(steps))
    count = np.zeros(shape, dtype=np.int64)
    np.add.at(count, (operation, data_rank, step), 1)
    whole = (count == 1).all(axis=(0, 1))
    if not whole.any():
        raise UserError(f"{path}: no step has every operation of every rank exactly once")
    start, duration = np.zeros(shape), np.zeros(shape)
    start[operation, data_rank, step] = columns["start_ts"]
    duration[operation, data_rank, step] = columns["duration"]
    chunk, place = np.full(len(keys), -1), np.full(len(keys), -1)
    chunk[operation], place[operation] = columns["mc"], columns["gmc"]
    operations = {
        key: Operation(key, int(chunk[n]), int(place[n]), start[n][:, whole], duration[n][:, whole])
        for n, key in enumerate(keys)
    }
    numbers = np.zeros((len(ranks), 1 + max(key[2] for key in keys)), dtype=np.int64)
    numbers[data_rank, columns["stage"]] = columns["rank"]
    if {key[2] for key in keys} != set(range(numbers.shape[1])):
        raise UserError(f"{path}: the stages are not numbered 0 to {numbers.shape[1] - 1} without gaps")
    if absent := [kind for kind in (FORWARD, BACKWARD) if not any(key[0] == kind for key in keys)]:
        raise UserError(f"{path}: no event is called {' or '.join(absent)}")
    return PipelineJob(operations, numbers), int((~whole).sum())


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise UserError(f"{path}: no table of pipeline events: it has no column {', '.join(missing)}")
    columns: dict[str, NDArray[Any]] = {}
    for name in COLUMNS:
        wanted = pyarrow.string() if name == "optype" else None
        wanted = wanted or (pyarrow.float64() if name in ("start_ts", "duration") else pyarrow.int64())
        try:
            column = table[name].cast(wanted)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: column {name} is no {wanted}: {str(error).splitlines()[0]}") from None
        if column.null_count:
            raise UserError(f"{path}: column {name} lacks {column.null_count} values")
        columns[name] = column.to_numpy()
    if not len(columns["step"]):
        raise UserError(f"{path}: the table has no rows")
    if columns["stage"].min() < 0 or columns["stage"].max() > MOST_STAGES:
        raise UserError(f"{path}: stages must be 0 to {MOST_STAGES}")
    return columns


def _operations(columns: dict[str, NDArray[Any]]) -> tuple[list[Key], NDArray[np.int64]]:
    kinds, kind = np.unique(columns["optype"].astype(str), return_inverse=True)
    triples = np.stack([kind, columns["seq_id"], columns["stage"]], axis=1)
    unique, operation = np.unique(triples, axis=0, return_inverse=True)
    return [(str(kinds[k]), int(seq), int(stage)) for k, seq, stage in unique.tolist()], operation.reshape(-1)
