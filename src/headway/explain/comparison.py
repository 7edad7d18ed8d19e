"""Two runs beside each other: by what a step became longer or shorter, and whether that is more than chance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import UserError
from headway.explain.idle import CAUSES
from headway.explain.report import Report

SIGNIFICANT = 2.0
"""A change of so many standard errors is beyond the spread of the steps."""
RUN_TO_RUN = 0.014
"""Two runs of one thing differ by this share of a step (tuning runs of torchtitan on 8 B200), so less says nothing."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class CauseChange:
    """What one cause takes of a step in both runs; the causes of a step add up to it."""

    name: str
    before_us: float
    after_us: float
    is_beyond_spread: bool

    @property
    def change_us(self) -> float:
        """Longer by this; negative: shorter."""
        return self.after_us - self.before_us


@dataclass(frozen=True)
class Comparison:
    """The difference of two runs, a step."""

    before_us: float
    after_us: float
    is_beyond_spread: bool
    causes: tuple[CauseChange, ...]
    """The largest change first."""

    @property
    def text(self) -> str:
        """One sentence."""
        change = self.after_us - self.before_us
        steps = f"{self.before_us / 1000:,.2f} ms a step, then {self.after_us / 1000:,.2f}"
        share = change / self.before_us if self.before_us else 0.0
        if not self.is_beyond_spread:
            return f"{steps}: {share:+.1%}, inside the spread from step to step and run to run, so no difference"
        first = self.causes[0]
        return (
            f"{steps}: {share:+.1%}, most of it by {first.name.replace('_', ' ')} ({first.change_us / 1000:+,.2f} ms)"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "before_us": self.before_us,
            "after_us": self.after_us,
            "change_us": self.after_us - self.before_us,
            "is_beyond_spread": self.is_beyond_spread,
            "text": self.text,
            "causes": [
                {
                    "cause": cause.name,
                    "before_us": cause.before_us,
                    "after_us": cause.after_us,
                    "change_us": cause.change_us,
                    "is_beyond_spread": cause.is_beyond_spread,
                }
                for cause in self.causes
            ],
        }


def compare(before: Report, after: Report) -> Comparison:
    """Compare what two runs' steps took. Raises UserError when one of them has no step that is told."""
    first, second = (_steps(report, name) for report, name in ((before, "first"), (after, "second")))
    names = list(first)
    whole_before, whole_after = (sum(run[name] for name in names) for run in (first, second))
    causes = [
        CauseChange(
            name,
            float(first[name].mean()),
            float(second[name].mean()),
            _beyond(first[name], second[name], float(np.mean(whole_before))),
        )
        for name in names
    ]
    causes = [cause for cause in causes if cause.before_us or cause.after_us]
    return Comparison(
        before_us=float(np.mean(whole_before)),
        after_us=float(np.mean(whole_after)),
        is_beyond_spread=_beyond(np.asarray(whole_before), np.asarray(whole_after), float(np.mean(whole_before))),
        causes=tuple(sorted(causes, key=lambda cause: -abs(cause.change_us))),
    )


def _beyond(before: Values, after: Values, step_us: float) -> bool:
    change = abs(float(after.mean()) - float(before.mean()))
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    return bool(change > SIGNIFICANT * error and change > RUN_TO_RUN * step_us)


def _steps(report: Report, name: str) -> dict[str, Values]:
    """us by cause of each step of each rank; the whole window of a rank whose steps are not told."""
    steps: list[Mapping[str, Any]] = []
    for rank in report.explained.ranks:
        # The first and the last step may be cut by the profiler's window.
        told: Sequence[Mapping[str, Any]] = rank.get("steps") or []
        steps += told[1:-1] if len(told) > 3 else told
    if not steps:
        raise UserError(
            f"the {name} run has no trace with training steps (ProfilerStep#N): there is nothing to compare"
        )
    values = {
        "compute": [step["compute_us"] for step in steps],
        "exposed_communication": [step["exposed_communication_us"] for step in steps],
        "copies_alone": [step["busy_us"] - step["compute_us"] - step["exposed_communication_us"] for step in steps],
        **{f"idle_{cause}": [step["idle_by_cause_us"][cause] for step in steps] for cause in CAUSES},
    }
    return {key: np.array(value, dtype=np.float64) for key, value in values.items()}
