"""All ways to run a recipe on a number of devices, as columns, and why others are refused."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.errors import UserError
from headway.parallel.pipeline import SCHEDULES
from headway.plan.choice import Checkpointing, Choice, Precision
from headway.plan.rules import Rules, schedules_of
from headway.recipe import Recipe

Integers = NDArray[np.int64]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32")
LARGEST_MICRO_BATCH = 64
"""Samples; a device that needs more of them at once is better served by fewer devices."""


class Division(NamedTuple):
    """Ranks of each axis."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp_ring: int
    cp_ulysses: int
    pp: int
    ep: int

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self._asdict().items() if size > 1) or "1 device"


@dataclass
class Rejections:
    """Reasons, each with how many layouts it concerns and one of them."""

    groups: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    """Reason without its numbers -> (count, layout, reason)."""

    def add(self, reason: str, layout: str, count: int = 1) -> None:
        """Reasons that differ only in numbers are one."""
        key = re.sub(r"\d[\d,. x=]*", "#", reason)
        before, first, told = self.groups.get(key, (0, layout, reason))
        self.groups[key] = (before + count, first, told)

    def as_json(self) -> list[dict[str, Any]]:
        """Most frequent first."""
        rows = sorted(self.groups.values(), key=lambda row: -row[0])
        return [{"layout": layout, "reason": reason, "count": count} for count, layout, reason in rows]


@dataclass(frozen=True)
class Candidates:
    """One element a candidate: int64 columns by the names of Choice, and ``micro_batches`` of a rank and step.

    Names of schedules, checkpointing and precisions are places in ``schedules``, CHECKPOINTING and PRECISIONS.
    """

    columns: dict[str, Integers]
    schedules: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def __getitem__(self, name: str) -> Integers:
        return self.columns[name]

    def choice(self, place: int) -> Choice:
        """Candidate number ``place``."""
        row: dict[str, Any] = {name: int(self.columns[name][place]) for name in Choice._fields}
        return Choice(
            **row
            | {
                "schedule": self.schedules[row["schedule"]],
                "checkpointing": CHECKPOINTING[row["checkpointing"]],
                "precision": PRECISIONS[row["precision"]],
                "reshard": bool(row["reshard"]),
            }
        )


def divisions(devices: int, has_experts: bool) -> Iterator[Division]:
    """Every way to share ``devices`` out to the axes; experts only where there are any."""
    for tp in _divisors(devices):
        for cp in _divisors(devices // tp):
            for pp in _divisors(devices // tp // cp):
                data = devices // tp // cp // pp
                for shard in _divisors(data):
                    sharing = shard * cp * tp
                    for ep in _divisors(sharing) if has_experts else (1,):
                        for ulysses in _divisors(cp):
                            yield Division(data // shard, shard, tp, cp // ulysses, ulysses, pp, ep)


def search_space(
    recipe: Recipe, devices: Sequence[int], rules: Rules, precisions: Sequence[Precision] = PRECISIONS
) -> tuple[Candidates, Rejections]:
    """All candidates that training would take. Raises UserError when there is none, with why."""
    rejections = Rejections()
    rows: list[tuple[Any, ...]] = []
    names = tuple(dict.fromkeys(name for pp in (1, 2) for name, _ in schedules_of(pp)))
    for count in devices:
        for division in divisions(count, rules.has_experts):
            reason = _refused(division, rules)
            if reason is not None:
                rejections.add(reason, str(division))
                continue
            rows += [
                (count, *division, names.index(schedule), stages, micro)
                for schedule, stages, micro in _steps(recipe, division, rules, rejections)
            ]
    if not rows:
        counts = ", ".join(map(str, devices))
        most = rejections.as_json()
        why = f": {most[0]['reason']}" if most else ""
        raise UserError(f"no layout of {recipe.model.class_name} divides {counts} devices{why}")
    columns = ("devices", *Division._fields, "schedule", "stages_per_rank", "micro_batch")
    table = dict(zip(columns, np.array(rows, dtype=np.int64).T, strict=True))
    data = table["dp_replicate"] * table["dp_shard"]
    table["micro_batches"] = recipe.run.global_batch // (data * table["micro_batch"])
    return _with_policies(table, names, rules, precisions, rejections), rejections


def _refused(division: Division, rules: Rules) -> str | None:
    """The first thing in the way of a division of the ranks."""
    cp = division.cp_ring * division.cp_ulysses
    return (
        rules.tensor(division.tp, cp > 1)
        or rules.expert(division.ep, division.dp_shard * cp * division.tp)
        or rules.context(division.cp_ring, division.cp_ulysses, division.tp)
    )


def _steps(recipe: Recipe, division: Division, rules: Rules, rejections: Rejections) -> Iterator[tuple[str, int, int]]:
    """(schedule, stages a rank, micro-batch) that a division can have."""
    data = division.dp_replicate * division.dp_shard
    if recipe.run.global_batch % data:
        rejections.add(
            f"run.global_batch = {recipe.run.global_batch} is not a multiple of {data} data-parallel ranks",
            str(division),
        )
        return
    each = recipe.run.global_batch // data
    micros = [micro for micro in _divisors(each) if micro <= LARGEST_MICRO_BATCH]
    for schedule, stages in schedules_of(division.pp):
        if division.pp > 1:
            cuts = rules.cuts(division.pp * stages)
            if isinstance(cuts, str):
                rejections.add(cuts, f"{division} {schedule}x{stages}")
                continue
        for micro in micros:
            reason = rules.schedule(schedule, division.pp, stages, each // micro) if division.pp > 1 else None
            if reason is not None:
                rejections.add(reason, f"{division} {schedule}x{stages}, micro-batch {micro}")
            else:
                yield schedule, stages, micro


def _with_policies(
    table: dict[str, Integers],
    schedules: tuple[str, ...],
    rules: Rules,
    precisions: Sequence[Precision],
    rejections: Rejections,
) -> Candidates:
    """Each layout with each precision, checkpointing and reshard policy that goes with its schedule."""
    piped, sharded = table["pp"] > 1, table["dp_shard"] * table["cp_ring"] * table["cp_ulysses"] > 1
    splits = piped & np.array([SCHEDULES[name].splits_backward for name in schedules])[table["schedule"]]
    parts: list[dict[str, Integers]] = []
    for checkpointing, kept in enumerate(CHECKPOINTING):
        for reshard in (True, False):
            fits = sharded | (splits != reshard)  # where nothing is gathered one of the two is enough
            for number, name in enumerate(schedules):
                here = piped & fits & (table["schedule"] == number)
                reason = rules.policy(name, kept, reshard) if here.any() else None
                if reason is not None:
                    fits &= ~here
                    rejections.add(reason, f"{name}, recompute {kept}", int(here.sum()) * len(precisions))
            chosen = {column: values[fits] for column, values in table.items()}
            parts += _policies(chosen, checkpointing, reshard, precisions)
    merged = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Candidates(merged, schedules)


def _policies(
    table: dict[str, Integers], checkpointing: int, reshard: bool, precisions: Sequence[Precision]
) -> list[dict[str, Integers]]:
    count = len(table["tp"])
    return [
        table
        | {
            "checkpointing": np.full(count, checkpointing, dtype=np.int64),
            "precision": np.full(count, PRECISIONS.index(precision), dtype=np.int64),
            "reshard": np.full(count, int(reshard), dtype=np.int64),
        }
        for precision in precisions
    ]


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
