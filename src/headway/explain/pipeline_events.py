"""Tables of a job's pipeline events: what stragglers cost, and whether a stage, a worker or the data is to blame."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from headway.explain.finding import (
    CauseClass,
    Confidence,
    Evidence,
    Explained,
    Finding,
    Fix,
    HealthMessage,
    Recoverable,
    Severity,
)
from headway.explain.input import Input
from headway.explain.pipeline_job import BACKWARD, FORWARD, GC, Key, PipelineJob, Times
from headway.explain.pipeline_table import read_job
from headway.explain.reading import read_each, side_by_side

SLOWEST_WORKERS = 0.03
"""Share of the workers that count as the slowest ones (section 5 of the paper)."""
WORTH = 0.03
"""A slowdown below this is what the simulation is off by."""
TO_BLAME = 0.5
"""Share of the slowdown that goes with a stage or with workers, from which they are its cause."""
VARIES, TOGETHER = 0.1, 0.9
"""Passes of one stage vary by this (standard deviation over mean), and forward with backward (correlation), when the
sequences' lengths vary."""


@dataclass(frozen=True)
class Slowdown:
    """What stragglers cost a job, and what of it goes when a part of the job takes typical times."""

    measured_s: float
    """Mean step as it was."""
    simulated_s: float
    """Mean step as played with all measured durations, without delays between operations."""
    typical_s: float
    """Mean step as played with typical durations: no stragglers."""
    stage_share: float
    """M_S: share of the slowdown that goes when the last stage takes typical times."""
    worker_share: float
    """M_W: the same of the slowest 3 % of the workers."""
    workers: tuple[int, ...]
    """Rank numbers of these."""
    by_stage: tuple[float, ...]
    """The slowdown with only this stage's times as measured and all others typical."""
    by_kind: dict[str, float]

    @property
    def slowdown(self) -> float:
        """S: simulated step over the step without stragglers."""
        return self.simulated_s / self.typical_s


def explain_pipeline_events(inputs: Sequence[Input]) -> Explained:
    """Explain each table. Raises UserError when none can be read."""
    parts, unread = read_each(inputs, lambda path: _explained(path, *read_job(path)), Severity.FAILED)
    return side_by_side(parts, unread)


def slowdown_of(job: PipelineJob) -> Slowdown:
    """Play the job as measured, without stragglers, and with parts of it exchanged (section 4 of the paper)."""
    measured, typical = job.measured, job.typical
    simulated_s, typical_s = job.step_time(measured), job.step_time(typical)
    lost = simulated_s - typical_s

    def share_without(chosen: Any) -> float:
        return (simulated_s - job.step_time(job.exchanged(measured, typical, chosen))) / lost if lost else 0.0

    def slowdown_with(chosen: Any) -> float:
        return job.step_time(job.exchanged(typical, measured, chosen)) / typical_s

    rows = np.arange(job.data_ranks)[:, None]
    by_data_rank = [slowdown_with(lambda _, r=rank: rows == r) for rank in range(job.data_ranks)]
    by_stage = [slowdown_with(lambda one, s=stage: one.stage == s) for stage in range(job.stages)]
    score = np.minimum(np.array(by_data_rank)[:, None], np.array(by_stage)[None, :])
    order = sorted(np.ndindex(*score.shape), key=lambda at: (-score[at], job.ranks[at]))
    slowest = order[: ceil(SLOWEST_WORKERS * len(order))]
    kinds = sorted({key[0] for key in job.operations})
    starts = np.minimum.reduce([one.start for one in job.operations.values()]).min(axis=0)
    ends = np.maximum.reduce([one.end for one in job.operations.values()]).max(axis=0)
    return Slowdown(
        measured_s=float((ends - starts).mean()),
        simulated_s=simulated_s,
        typical_s=typical_s,
        stage_share=share_without(lambda one: one.stage == job.stages - 1),
        worker_share=share_without(
            lambda one: np.isin(rows, [data_rank for data_rank, stage in slowest if stage == one.stage])
        ),
        workers=tuple(int(job.ranks[at]) for at in slowest),
        by_stage=tuple(by_stage),
        by_kind={kind: slowdown_with(lambda one, k=kind: one.kind == k) for kind in kinds},
    )


def _explained(path: Path, job: PipelineJob, left_out: int) -> Explained:
    found = slowdown_of(job)
    health = []
    if left_out:
        text = f"{left_out} steps lack events of some rank and were left out"
        health.append(HealthMessage("truncated-steps", Severity.WARNING, text, str(path)))
    delays = found.measured_s / found.simulated_s - 1
    if abs(delays) > 0.05:
        text = (
            f"played with its own durations a step takes {found.simulated_s:.3f} s, measured were "
            f"{found.measured_s:.3f} s: what lies between (data, launches) is not in the table"
        )
        health.append(HealthMessage("simulation-error", Severity.WARNING, text, str(path)))
    summary = {
        "file": str(path),
        "steps": int(next(iter(job.operations.values())).start.shape[1]),
        "data_ranks": job.data_ranks,
        "stages": job.stages,
        "measured_step_s": found.measured_s,
        "simulated_step_s": found.simulated_s,
        "step_without_stragglers_s": found.typical_s,
        "S": found.slowdown,
        "M_S": found.stage_share,
        "M_W": found.worker_share,
        "slowest_workers": list(found.workers),
        "slowdown_by_stage": list(found.by_stage),
        "slowdown_by_operation": found.by_kind,
    }
    findings = tuple(_findings(path, job, found))
    return Explained(tuple(health), findings=findings, details={"pipelines": [summary]})


def _findings(path: Path, job: PipelineJob, found: Slowdown) -> Iterator[Finding]:
    if found.slowdown - 1 >= WORTH:
        varies, together = _variation(job)
        by_length = varies >= VARIES and together >= TOGETHER
        if found.worker_share >= TO_BLAME:
            yield _slow_workers(path, job, found)
        elif by_length:
            yield _unequal_lengths(path, job, found, varies, together)
        elif found.stage_share >= TO_BLAME or max(found.by_stage) - 1 >= TO_BLAME * (found.slowdown - 1):
            yield _long_stage(path, job, found)
    yield from _collection(path, job, found)
    yield from _bubble(path, job, found)


def _variation(job: PipelineJob) -> tuple[float, float]:
    """How much the forward and backward passes of a stage vary, and how far both vary together; means over stages."""
    spreads, correlations = [], []
    for stage in range(job.stages):
        passes = {
            kind: {one.key[1]: one.duration.ravel() for one in job.operations.values() if one.key[::2] == (kind, stage)}
            for kind in (FORWARD, BACKWARD)
        }
        common = sorted(set(passes[FORWARD]) & set(passes[BACKWARD]))
        if not common:
            continue
        forward, backward = (np.concatenate([passes[kind][n] for n in common]) for kind in (FORWARD, BACKWARD))
        spreads.append(float(backward.std() / backward.mean()) if backward.mean() else 0.0)
        if forward.std() and backward.std():
            correlations.append(float(np.corrcoef(forward, backward)[0, 1]))
    return float(np.mean(spreads or [0])), float(np.mean(correlations or [0]))


def _total_us(job: PipelineJob, seconds: float) -> float:
    return seconds * 1e6 * next(iter(job.operations.values())).start.shape[1]


def _gain(job: PipelineJob, found: Slowdown, low_s: float, high_s: float) -> Recoverable:
    return Recoverable.of_window(
        _total_us(job, max(low_s, 0)), _total_us(job, max(high_s, low_s, 0)), _total_us(job, found.measured_s)
    )


def _evidence(path: Path, job: PipelineJob, kinds: Sequence[str], text: str, ranks: Sequence[int] = ()) -> Evidence:
    chosen = [one for one in job.operations.values() if one.kind in kinds]
    return Evidence(str(path), tuple(kinds), sum(one.start.size for one in chosen), text, tuple(ranks))


def _long_stage(path: Path, job: PipelineJob, found: Slowdown) -> Finding:
    longest = int(np.argmax(found.by_stage))
    level = _levelled(job)
    gain_s = found.simulated_s - job.step_time(level)
    alone = job.exchanged(job.measured, job.typical, lambda one: one.stage == longest)
    low, high = sorted((gain_s, found.simulated_s - job.step_time(alone)))
    return Finding(
        id="pipeline-stage-imbalance",
        title=f"Stage {longest} of the pipeline is longer than the others",
        claim=(
            f"A step takes {found.slowdown:.3f} times what it would without stragglers; with only stage {longest} as "
            f"measured it still takes {found.by_stage[longest]:.3f} times (the last stage explains M_S "
            f"{found.stage_share:.2f} of the slowdown, the slowest workers M_W {found.worker_share:.2f})."
        ),
        cause_class=CauseClass.PIPELINE,
        confidence=Confidence.HIGH,
        evidence=(
            _evidence(path, job, (FORWARD, BACKWARD), f"stage {longest}", sorted(job.ranks[:, longest].tolist())),
        ),
        recoverable=_gain(job, found, low, high),
        fix=Fix(
            f"Move layers from stage {longest} to the others: fewer beside the output head, its loss and the embedding "
            "(layout.pp_cuts)."
        ),
        verify="Forward and backward passes of all stages take the same, and S falls towards 1.",
        falsified_by="Passes of one stage vary with the micro-batch as much as between stages: then it is the data.",
    )


def _mean_passes(job: PipelineJob) -> dict[tuple[str, int], float]:
    """Mean seconds of a forward and of a backward pass by stage."""
    means: dict[tuple[str, int], float] = {}
    for kind in (FORWARD, BACKWARD):
        for stage in range(job.stages):
            mine = [one.duration for one in job.operations.values() if one.key[::2] == (kind, stage)]
            means[kind, stage] = float(np.mean(np.stack(mine))) if mine else 0.0
    return means


def _levelled(job: PipelineJob) -> dict[Key, Times]:
    """Passes scaled so that every stage takes the same on average."""
    means = _mean_passes(job)
    scale: dict[tuple[str, int], float] = {}
    for (kind, stage), mean in means.items():
        level = sum(means[kind, other] for other in range(job.stages)) / job.stages
        scale[kind, stage] = level / mean if mean else 1.0
    return {key: times * scale.get((key[0], key[2]), 1.0) for key, times in job.measured.items()}


def _unequal_lengths(path: Path, job: PipelineJob, found: Slowdown, varies: float, together: float) -> Finding:
    """All passes of a stage take that stage's mean: what balanced sequences would give."""
    means = _mean_passes(job)
    even = {
        key: np.full_like(times, means[key[0], key[2]]) if (key[0], key[2]) in means else times
        for key, times in job.measured.items()
    }
    high = found.simulated_s - job.step_time(even)
    return Finding(
        id="sequence-length-imbalance",
        title="Micro-batches take different times: their sequences have different lengths",
        claim=(
            f"A step takes {found.slowdown:.3f} times what it would without stragglers. Backward passes of one stage "
            f"vary by {100 * varies:.0f} %, forward with them (correlation {together:.2f}), on all workers in turn "
            f"(the slowest explain M_W {found.worker_share:.2f} of it, the last stage M_S {found.stage_share:.2f}): "
            "the data does it."
        ),
        cause_class=CauseClass.DATA,
        confidence=Confidence.HIGH,
        evidence=(_evidence(path, job, (FORWARD, BACKWARD), "passes compared", sorted(job.ranks.ravel().tolist())),),
        recoverable=_gain(job, found, 0.3 * high, high),
        fix=Fix(
            "Distribute sequences so that the sum of squared lengths is equal over data ranks and micro-batches; pack, "
            "or sort into bins of like length.",
            {"data.packing": True},
        ),
        verify="The spread of backward passes within a stage falls, and S with it.",
        falsified_by="Micro-batches of equal tokens and equal squared lengths vary as much.",
    )


def _slow_workers(path: Path, job: PipelineJob, found: Slowdown) -> Finding:
    workers = ", ".join(map(str, found.workers[:8]))
    high = found.worker_share * (found.simulated_s - found.typical_s)
    return Finding(
        id="slow-worker",
        title=f"Worker {workers} is slower than the others",
        claim=(
            f"A step takes {found.slowdown:.3f} times what it would without stragglers; "
            f"{100 * found.worker_share:.0f} % of that goes when worker {workers} takes typical times."
        ),
        cause_class=CauseClass.STRAGGLER,
        confidence=Confidence.HIGH,
        evidence=(_evidence(path, job, (FORWARD, BACKWARD), "passes of all workers", found.workers),),
        recoverable=_gain(job, found, 0.5 * high, high),
        fix=Fix("Look at the host and device of this worker: clocks, errors, other processes; replace it."),
        verify="Its passes take what the others' take, and S falls towards 1.",
        falsified_by="On another machine the same worker is as slow: then it is its stage or its data.",
    )


def _collection(path: Path, job: PipelineJob, found: Slowdown) -> Iterator[Finding]:
    """Garbage collection that not all workers do at once, or that takes long."""
    without = job.step_time(
        {key: np.zeros_like(times) if key[0] == GC else times for key, times in job.measured.items()}
    )
    gain = found.simulated_s - without
    if gain < 0.01 * found.simulated_s:
        return
    yield Finding(
        id="garbage-collection",
        title="Python's garbage collector stops workers",
        claim=f"Without collections a step would take {gain * 1e3:,.0f} ms less of {found.simulated_s * 1e3:,.0f} ms.",
        cause_class=CauseClass.HOST,
        confidence=Confidence.HIGH,
        evidence=(_evidence(path, job, (GC,), "collections"),),
        recoverable=_gain(job, found, 0.5 * gain, gain),
        fix=Fix("gc.disable() and gc.collect(1) every N steps on all ranks at once."),
        verify="Collections take place in the same steps on all workers, and the others shorten.",
        falsified_by="Steps without collections take as long.",
    )


def _bubble(path: Path, job: PipelineJob, found: Slowdown) -> Iterator[Finding]:
    """Idle time of a pipeline with equal stages: (p - 1) / (m v + p - 1) of m micro-batches and v chunks a stage."""
    if job.stages < 2:
        return
    passes = sum(1 for one in job.operations.values() if one.kind == FORWARD and one.stage == 0)
    chunks = max(1 + max(one.chunk for one in job.operations.values() if one.kind == FORWARD), 1)
    bubble = (job.stages - 1) / (passes + job.stages - 1)
    work = sum(float(one.duration.mean()) for one in job.operations.values() if one.kind in (FORWARD, BACKWARD))
    ideal_s = work / job.stages
    idle = 1 - ideal_s / found.simulated_s
    if bubble < 0.1 or idle < bubble / 2:
        return
    twice = (job.stages - 1) / (2 * passes + job.stages - 1)
    low = found.typical_s * (bubble - twice) * 0.5
    high = found.typical_s * (bubble - twice)
    yield Finding(
        id="pipeline-bubble",
        title="The pipeline fills and drains for much of the step",
        claim=(
            f"With {job.stages} stages, {chunks} chunks on each, and {passes // chunks} micro-batches a stage "
            f"computes nothing for at least {100 * bubble:.0f} % of the passes' time; measured, stages compute "
            f"{100 * (1 - idle):.0f} % of the step on average."
        ),
        cause_class=CauseClass.PIPELINE,
        confidence=Confidence.MEDIUM,
        evidence=(_evidence(path, job, (FORWARD, BACKWARD), f"{passes} passes a stage and direction"),),
        recoverable=_gain(job, found, low, high),
        fix=Fix(
            "More micro-batches, several chunks a stage (interleaved), or a schedule that fills it (zero-bubble).",
            {"layout.pp_schedule": "interleaved_zero_bubble"},
        ),
        verify="Twice the micro-batches take less than twice the step.",
        falsified_by="Stages wait for uneven passes or messages, not for the pipeline to fill.",
    )
