"""From memory snapshots to health, findings, and what holds the peak of each device."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.explain.finding import Explained, HealthMessage, Severity
from headway.explain.input import Input
from headway.explain.memory_snapshot.categories import Category, bytes_by_category
from headway.explain.memory_snapshot.findings import gib, memory_findings
from headway.explain.memory_snapshot.peak import Peak, peak_of
from headway.explain.memory_snapshot.snapshot import DeviceSnapshot, read_snapshot
from headway.explain.reading import read_each

_CURVE_POINTS = 500


def explain_memory_snapshot(inputs: Sequence[Input]) -> Explained:
    """Health and peak of each device in each file, and the findings of the one with the highest peak.

    Raises UserError when no snapshot can be read.
    """
    files, health = read_each(inputs, read_snapshot)
    snapshots = [device for file in files for device in file]
    peaks = [peak_of(snapshot) for snapshot in snapshots]
    held = [
        bytes_by_category(peak.held, _has_stacks(snapshot)) for snapshot, peak in zip(snapshots, peaks, strict=True)
    ]
    for snapshot, peak, held_by in zip(snapshots, peaks, held, strict=True):
        health += _health(snapshot, peak, held_by)
    worst = max(range(len(peaks)), key=lambda place: peaks[place].allocated)
    return Explained(
        health=tuple(health),
        findings=tuple(memory_findings(snapshots[worst], peaks[worst], held[worst])),
        details={
            "memory": [
                _as_json(snapshot, peak, held_by)
                for snapshot, peak, held_by in zip(snapshots, peaks, held, strict=True)
            ]
        },
    )


def _has_stacks(snapshot: DeviceSnapshot) -> bool:
    return any(action.stack for action in snapshot.history)


def _health(snapshot: DeviceSnapshot, peak: Peak, held_by: Counter[Category]) -> list[HealthMessage]:
    where = f"{snapshot.path.name}, device {snapshot.device}"
    found: list[tuple[str, Severity, str]] = []
    if not snapshot.history:
        found.append(
            (
                "no-history",
                Severity.WARNING,
                "no history: the state is that of the snapshot, which need not be the peak. Call "
                "torch.cuda.memory._record_memory_history() before the first step",
            )
        )
    elif not _has_stacks(snapshot):
        found.append(("no-stacks", Severity.WARNING, "no stack was recorded: what memory is for can't be told"))
    if snapshot.overflowed:
        found.append(
            (
                "history-overflowed",
                Severity.WARNING,
                f"the history's ring of {len(snapshot.history)} entries overflowed: what came before is lost, the true "
                "peak may be there. Raise max_entries",
            )
        )
    elif peak.freed_unseen:
        found.append(
            (
                "history-begins-late",
                Severity.NOTE,
                f"the history frees {gib(peak.freed_unseen)} that it did not allocate: it begins in the middle, or its "
                "ring overflowed",
            )
        )
    before = held_by[Category.BEFORE_RECORDING]
    if snapshot.history and before > 0.2 * peak.allocated:
        found.append(
            (
                "allocated-before-recording",
                Severity.NOTE,
                f"{gib(before)} of the peak's {gib(peak.allocated)} were allocated before the recording began, as a "
                "rule parameters, gradients and optimizer state: record from the program's start to tell them apart",
            )
        )
    if snapshot.malformed:
        found.append(
            ("malformed-entries", Severity.WARNING, f"{snapshot.malformed} entries can't be read and are left out")
        )
    return [HealthMessage(id, severity, f"{where}: {text}", str(snapshot.path)) for id, severity, text in found]


def _as_json(snapshot: DeviceSnapshot, peak: Peak, held_by: Counter[Category]) -> dict[str, Any]:
    stride = max(1, len(peak.curve) // _CURVE_POINTS)
    return {
        "file": str(snapshot.path),
        "device": snapshot.device,
        "peak_gib": peak.allocated / 2**30,
        "reserved_at_peak_gib": peak.reserved / 2**30,
        "held_by": {category.value: size / 2**30 for category, size in held_by.most_common()},
        "in_holes_gib": peak.in_split_segments / 2**30,
        "in_empty_segments_gib": peak.in_empty_segments / 2**30,
        "peak_after_actions": peak.place,
        "recorded_actions": len(snapshot.history),
        "curve_gib": [round(size / 2**30, 6) for size in peak.curve[::stride].tolist()],
    }
