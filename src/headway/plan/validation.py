"""Predictions of a table of measured runs, held against what the table measured.

No constant belongs to a row or a model. Some of a framework's behaviour was chosen with its runs in sight
(docs/published_runs.md lists which): the errors of those sources are no forecast of runs that nobody has looked at.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.cost import Estimate
from headway.errors import UserError
from headway.plan.mapping import Case, Unmapped, case_of, with_micro_batch
from headway.plan.measured import measured_peak_memory, measured_step_time
from headway.plan.prediction import Prediction, predict
from headway.plan.runs_table import Run

MICRO_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0)
RECOMPUTED_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class RowResult:
    """A row of the table: what was predicted and measured, or why nothing was."""

    run: Run
    kind: str = ""
    predicted_step_time_s: Estimate | None = None
    measured_step_time_s: float | None = None
    predicted_peak_memory_gib: Estimate | None = None
    measured_peak_memory_gib: float | None = None
    layout: tuple[Any, ...] = ()
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """As ``headway validate`` gives it out."""
        return {
            "id": self.run.id,
            "source": self.run.source,
            "predicted_step_time_s": _ends(self.predicted_step_time_s),
            "measured_step_time_s": self.measured_step_time_s,
            "predicted_peak_memory_gib": _ends(self.predicted_peak_memory_gib),
            "measured_peak_memory_gib": self.measured_peak_memory_gib,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Errors:
    """Of one quantity over rows, in percent of what was measured."""

    rows: int
    mean_absolute_percent: float
    median: float
    bias: float
    p90: float
    coverage: float
    """Share of the rows whose measurement lies in its range."""

    @staticmethod
    def of(pairs: list[tuple[Estimate, float]]) -> "Errors | None":
        """From predictions and measurements; None without any."""
        if not pairs:
            return None
        errors = 100 * np.array([float(found.value) / measured - 1 for found, measured in pairs])
        inside = [bool(found.low <= measured <= found.high) for found, measured in pairs]
        absolute = np.abs(errors)
        return Errors(
            len(pairs),
            float(absolute.mean()),
            float(np.median(absolute)),
            float(errors.mean()),
            float(np.percentile(absolute, 90)),
            float(np.mean(inside)),
        )


@dataclass(frozen=True)
class Regret:
    """Time lost by trusting the predicted best of a group of rows that differ in their layout only."""

    groups: int
    mean_percent: float
    worst_percent: float


@dataclass(frozen=True)
class Summary:
    """Errors of a set of rows."""

    time: Errors | None
    memory: Errors | None
    regret: Regret | None

    @staticmethod
    def of(rows: Iterable[RowResult]) -> "Summary":
        """Over the rows that have both a prediction and a measurement."""
        chosen = [row for row in rows if not row.run.contradicts_itself]
        times = [
            (row.predicted_step_time_s, row.measured_step_time_s)
            for row in chosen
            if row.predicted_step_time_s is not None and row.measured_step_time_s is not None
        ]
        memories = [
            (row.predicted_peak_memory_gib, row.measured_peak_memory_gib)
            for row in chosen
            if row.predicted_peak_memory_gib is not None and row.measured_peak_memory_gib is not None
        ]
        return Summary(Errors.of(times), Errors.of(memories), regret_of(chosen))

    def as_json(self) -> dict[str, Any]:
        """The time's errors, the regret, and the memory's errors below ``memory``."""
        found: dict[str, Any] = dict(vars(self.time)) if self.time else {"rows": 0}
        found["regret"] = self.regret.mean_percent if self.regret else None
        found["regret_groups"] = self.regret.groups if self.regret else 0
        found["memory"] = dict(vars(self.memory)) if self.memory else None
        return found


@dataclass(frozen=True)
class Validation:
    """All rows of a table."""

    rows: list[RowResult]

    @property
    def overall(self) -> Summary:
        """Over all rows."""
        return Summary.of(self.rows)

    def by_source(self) -> dict[str, Summary]:
        """Over the rows of each source."""
        return self._by(lambda row: row.run.family)

    def by_kind(self) -> dict[str, Summary]:
        """Over dense language models, mixtures of experts, and diffusion models."""
        return self._by(lambda row: row.kind)

    def _by(self, key: Callable[[RowResult], str]) -> dict[str, Summary]:
        groups: dict[str, list[RowResult]] = defaultdict(list)
        for row in self.rows:
            if not row.reason:
                groups[key(row)].append(row)
        return {name: Summary.of(groups[name]) for name in sorted(groups)}

    def reasons(self) -> dict[str, int]:
        """Why rows could not be mapped, and how many each."""
        counts: dict[str, int] = defaultdict(int)
        for row in self.rows:
            if row.reason:
                counts[row.reason] += 1
        return dict(counts)

    def as_json(self) -> dict[str, Any]:
        """The result of ``headway validate``."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "sources": {name: summary.as_json() for name, summary in self.by_source().items()},
            "kinds": {name: summary.as_json() for name, summary in self.by_kind().items()},
            "overall": self.overall.as_json()
            | {"mapped": sum(not row.reason for row in self.rows), "not_mapped": self.reasons()},
        }


def validate(runs: Iterable[Run]) -> Validation:
    """Predict each row that can be mapped."""
    return Validation([_row(run) for run in runs])


def _row(run: Run) -> RowResult:
    try:
        case = case_of(run)
        case, prediction = _predicted(case)
    except Unmapped as why:
        return RowResult(run, reason=str(why))
    except UserError as why:  # no rate of the precision is known on the accelerator
        return RowResult(run, reason=str(why))
    return RowResult(
        run,
        case.kind,
        _first(prediction.step_time_s),
        measured_step_time(case),
        _first(prediction.peak_memory_gib),
        measured_peak_memory(case),
        _layout_of(case),
    )


def _predicted(case: Case) -> tuple[Case, Prediction]:
    """The prediction; where no micro-batch is stated, of the one that is predicted to be the fastest that fits.

    Where nothing is said of recomputation and the run would not fit by far without, it must have recomputed layers:
    as few as let it fit, or all where the framework has no choice between.
    """
    if case.micro_batch_stated:
        found = predict(case.cluster, case.shape, case.layouts, case.settings, case.behaviour)
        unsaid = not (case.run.words["recompute"] or case.settings.recompute_layers or case.settings.recompute)
        shares = RECOMPUTED_SHARES if case.behaviour.recomputes_some_layers else RECOMPUTED_SHARES[-1:]
        for share in shares if unsaid else ():
            if float(np.ravel(found.peak_memory_gib.low)[0]) <= 1.1 * case.cluster.accelerator.memory_gb:
                break
            case = replace(case, settings=replace(case.settings, recompute_layers=share))
            found = predict(case.cluster, case.shape, case.layouts, case.settings, case.behaviour)
        return case, found
    most = float(case.layouts.global_batch[0] / case.layouts.dp[0])
    tried = []
    for micro in MICRO_BATCHES:
        if micro == 1 or (micro <= most and most % micro == 0):
            other = with_micro_batch(case, micro)
            tried.append((other, predict(other.cluster, other.shape, other.layouts, other.settings, other.behaviour)))
    room = case.cluster.accelerator.memory_gb * 0.93
    fitting = [pair for pair in tried if float(pair[1].peak_memory_gib.value[0]) <= room] or tried[:1]  # type: ignore[index]
    return min(fitting, key=lambda pair: float(pair[1].step_time_s.value[0]))  # type: ignore[index]


def _first(estimate: Estimate) -> Estimate:
    value, low, high = (float(np.ravel(end)[0]) for end in (estimate.value, estimate.low, estimate.high))
    return Estimate(value, low, high)


def _ends(estimate: Estimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {"value": float(estimate.value), "low": float(estimate.low), "high": float(estimate.high)}


def _layout_of(case: Case) -> tuple[Any, ...]:
    columns = case.layouts
    sizes = (columns.tp, columns.cp, columns.pp, columns.virtual, columns.ep, columns.etp, columns.micro_batch)
    numbers = tuple(float(size[0]) for size in sizes)
    return (*numbers, case.settings.data_parallel, case.settings.recompute_layers, case.settings.recompute)


def regret_of(rows: Iterable[RowResult]) -> Regret | None:
    """Over groups of rows of one source that share all but the layout; None where there are none."""
    groups: dict[tuple[Any, ...], list[RowResult]] = defaultdict(list)
    for row in rows:
        if row.predicted_step_time_s is None or row.measured_step_time_s is None:
            continue
        run = row.run
        same = (run.family, run.model, run.gpu, run.framework, run.words["precision"])
        sizes = tuple(run.numbers.get(column) for column in ("num_gpus", "seq_len", "global_batch", "layers"))
        groups[same + sizes].append(row)
    lost = [_lost(group) for group in groups.values() if len({row.layout for row in group}) > 1]
    if not lost:
        return None
    return Regret(len(lost), 100 * float(np.mean(lost)), 100 * max(lost))


def _lost(group: list[RowResult]) -> float:
    times = {row.run.id: row.measured_step_time_s or 0.0 for row in group}
    chosen = min(group, key=lambda row: float(row.predicted_step_time_s.value) if row.predicted_step_time_s else 0.0)
    return times[chosen.run.id] / min(times.values()) - 1
