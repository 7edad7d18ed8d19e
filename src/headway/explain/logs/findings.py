"""Findings of a trainer's log: stalls and their period, slowing down, losses, memory, restarts, errors."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix, Recoverable
from headway.explain.logs.series import Happening, Note, Series
from headway.explain.logs.stalls import Stalls, stalls_of

FEWEST_ROWS = 8
_SLOWER_SHARE = 0.05
_GROWTH_SHARE = 0.05
_DATA_SHARE = 0.10
_SPIKE_WINDOW = 20
_SPIKE_SPREADS = 8


def series_findings(series: Series) -> list[Finding]:
    """All findings of one log."""
    found = [
        _stalls(series),
        _slowing_down(series),
        _data_wait(series),
        _not_finite(series),
        _spike(series),
        _skipped(series),
        _memory_growth(series),
        _restarts(series),
        *_errors(series),
    ]
    return [finding for finding in found if finding is not None]


def _stalls(series: Series) -> Finding | None:
    stalls = stalls_of(series)
    if stalls is None:
        return None
    lost, share = stalls.lost_s * 1e6, stalls.lost_s / stalls.window_s
    gain = Recoverable.of_window(lost / 2, lost, stalls.window_s * 1e6) if series.in_seconds else None
    usual = f"{stalls.usual:.3g} s" if series.in_seconds else "the usual"
    places = ", ".join(str(step) for step in stalls.steps[:6]) + (", …" if len(stalls.steps) > 6 else "")
    period = f" They come every {stalls.period} steps." if stalls.period else ""
    id, title, cause, fix, recipe = _stall_of(stalls)
    return Finding(
        id=id,
        title=title.format(share=share),
        claim=f"After the warm-up these rows take up to {stalls.worst / stalls.usual:.1f} times {usual} a step: "
        f"steps {places} ({len(stalls.steps)} of {len(series.rows)} rows). They lose {share:.1%} of the time.{period}",
        cause_class=cause,
        confidence=Confidence.HIGH if stalls.beside else Confidence.MEDIUM,
        evidence=(_rows_evidence(series, stalls.rows, "slow rows"), *_notes_evidence(series, stalls.beside)),
        recoverable=gain,
        fix=Fix(fix, recipe),
        verify="The slow rows are gone from the log of a run as long",
        falsified_by="The rows are slow for more work, not for waiting: longer sequences, larger batches",
    )


def _stall_of(stalls: Stalls) -> tuple[str, str, CauseClass, str, dict[str, object]]:
    """Id, title, class, fix and overrides by what stands beside the slow rows."""
    by_what = {
        Happening.CHECKPOINT: (
            "log-checkpoint-stall",
            "Saving checkpoints stalls the training ({share:.1%} of the time)",
            CauseClass.CHECKPOINT,
            "Save asynchronously (staged in pinned memory, written beside training), or less often",
        ),
        Happening.VALIDATION: (
            "log-validation-stall",
            "Validation interrupts the training ({share:.1%} of the time)",
            CauseClass.HOST,
            "Validate less often, on fewer samples, or in a run of its own",
        ),
        Happening.GARBAGE_COLLECTION: (
            "log-garbage-collection-stall",
            "Python's garbage collection stalls steps ({share:.1%} of the time)",
            CauseClass.HOST,
            "gc.disable() after the start, and gc.collect(1) every some hundred steps on all ranks at once",
        ),
    }
    if stalls.beside:
        return (*by_what[stalls.beside[0].what], {})
    if stalls.period:
        text = (
            "Look for what the program does at that period: saving, validation, logging of samples, garbage collection "
            "(log gc.callbacks), a shard's end in the loader"
        )
        return "log-periodic-stall", "Steps stall periodically ({share:.1%} of the time)", CauseClass.HOST, text, {}
    text = (
        "Profile around such a step: a loader that runs dry, a rank that is late (compare ranks), recompilation for a "
        "new shape, a shared file system"
    )
    return "log-slow-steps", "Some steps are far slower than usual ({share:.1%} of the time)", CauseClass.HOST, text, {}


def _slowing_down(series: Series) -> Finding | None:
    """Each third of the run is slower than the one before, by more than rows differ anyway."""
    pace = series.pace[series.warm_up :]
    pace = pace[np.isfinite(pace)]
    if len(pace) < 3 * FEWEST_ROWS:
        return None
    thirds = [float(np.median(part)) for part in np.array_split(pace, 3)]
    spread = float(np.median(np.abs(pace - np.median(pace)))) * 1.4826 / len(pace) ** 0.5
    slower = thirds[2] / thirds[0] - 1
    if not thirds[0] < thirds[1] < thirds[2] or slower < _SLOWER_SHARE or thirds[2] - thirds[0] < 6 * spread:
        return None
    window = float(pace.sum()) * 1e6
    lost = float((pace - thirds[0]).clip(0).sum()) * 1e6
    return Finding(
        id="log-slowing-down",
        title=f"Steps become slower over the run: {slower:.1%} from its first third to its last",
        claim=f"The median row of each third is slower than that of the third before, the last by {slower:.1%}.",
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.MEDIUM,
        evidence=(_rows_evidence(series, range(series.warm_up, len(series.rows)), "rows after the warm-up"),),
        recoverable=Recoverable.of_window(lost / 2, lost, window) if series.in_seconds else None,
        fix=Fix(
            "Look at clocks and temperatures (nvidia-smi -q -d PERFORMANCE), at growing lists and caches on the host, "
            "at fragmentation (num_alloc_retries), and at whether sequences become longer by design"
        ),
        verify="A restarted run begins at the first third's speed and keeps it",
        falsified_by="The work a step grows: a curriculum of longer sequences, a growing batch",
    )


def _data_wait(series: Series) -> Finding | None:
    waits, times = series.column("data_wait_s")[series.warm_up :], series.step_s[series.warm_up :]
    known = np.isfinite(waits) & np.isfinite(times)
    if known.sum() < FEWEST_ROWS or waits[known].sum() < _DATA_SHARE * times[known].sum():
        return None
    covered = series.covered[series.warm_up :][known]
    waited, window = float((waits[known] * covered).sum()), float((times[known] * covered).sum())
    return Finding(
        id="log-data-wait",
        title=f"The training waits for data {waited / window:.0%} of the time",
        claim=f"{waited:.3g} s of {window:.3g} s are spent waiting for the loader, after the warm-up.",
        cause_class=CauseClass.DATA,
        confidence=Confidence.HIGH,
        evidence=(_rows_evidence(series, (np.flatnonzero(known) + series.warm_up).tolist(), "rows with data_wait_s"),),
        recoverable=Recoverable.of_window(0.8 * waited * 1e6, waited * 1e6, window * 1e6),
        fix=Fix("More workers, a deeper prefetch, decoding ahead or cached latents", {"data.workers": 8}),
        verify="data_wait_s falls to a few percent of step_time_s",
        falsified_by="The wait stays with twice the workers: the storage or the sampler itself is the limit",
    )


def _not_finite(series: Series) -> Finding | None:
    bad = [
        place
        for place, row in enumerate(series.rows)
        if row.values.get("nan", 0) > 0
        or any(name in row.values and not np.isfinite(row.values[name]) for name in ("loss", "grad_norm"))
    ]
    if not bad:
        return None
    first = series.rows[bad[0]]
    return Finding(
        id="log-loss-not-finite",
        title=f"The loss or gradient norm is not finite from step {first.step} on ({len(bad)} rows)",
        claim=f"{len(bad)} of {len(series.rows)} rows tell of a loss or gradient norm that is NaN or infinite, the "
        f"first at step {first.step}.",
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.HIGH,
        evidence=(_rows_evidence(series, bad, "rows that are not finite"),),
        recoverable=None,
        fix=Fix(
            "Go back to the checkpoint before it. Look at the batches of that step, at the learning rate and its "
            "warm-up, at clipping, and at what runs in float16 or float8 there"
        ),
        verify="The run passes the step with a finite loss",
        falsified_by="Only the logging is at fault: the weights after it are finite and the loss comes back",
    )


def _spike(series: Series) -> Finding | None:
    loss = series.column("loss")
    known = np.flatnonzero(np.isfinite(loss))
    spikes = []
    for place in range(_SPIKE_WINDOW, len(known)):
        before = loss[known[place - _SPIKE_WINDOW : place]]
        usual = float(np.median(before))
        spread = 1.4826 * float(np.median(np.abs(before - usual)))
        if loss[known[place]] > usual + max(_SPIKE_SPREADS * spread, 0.1 * abs(usual)):
            spikes.append(int(known[place]))
    if not spikes:
        return None
    highest = max(spikes, key=lambda place: loss[place])
    after = loss[known[known > spikes[-1]]]
    level = float(np.median(loss[known[known < spikes[0]]][-_SPIKE_WINDOW:]))
    recovered = len(after) > 0 and float(np.median(after[-_SPIKE_WINDOW:])) <= 1.05 * level
    ending = "and comes back" if recovered else "and is not back by the end"
    return Finding(
        id="log-loss-spike",
        title=f"The loss jumps at step {series.rows[spikes[0]].step} {ending}",
        claim=f"{len(spikes)} rows lie far above the {_SPIKE_WINDOW} before them: up to {loss[highest]:.4g} from "
        f"{level:.4g} (step {series.rows[highest].step}), {ending}.",
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.MEDIUM,
        evidence=(_rows_evidence(series, spikes, "rows with a jump of the loss"),),
        recoverable=None,
        fix=Fix(
            "Look at the batches of those steps, clip gradients or lower the learning rate; skip the batches if the "
            "loss does not come back from the checkpoint before"
        ),
        verify="A run from the checkpoint before with the change passes these steps without the jump",
        falsified_by="The data changes there by design (another mixture, longer sequences)",
    )


def _skipped(series: Series) -> Finding | None:
    """Skipped steps beyond those in which a float16 loss scale is found at the beginning."""
    skipped = series.column("skipped")
    rows = [place for place in np.flatnonzero(skipped > 0).tolist() if series.rows[place].step > _SCALE_FOUND_BY]
    notes = [note for note in series.notes if note.what is Happening.SKIPPED_STEP]
    count = int(skipped[rows].sum()) + len(notes)
    steps = max(1, int(series.covered.sum()))
    if count < 3 or count / steps < 0.002:
        return None
    return Finding(
        id="log-skipped-steps",
        title=f"{count} steps were skipped ({count / steps:.1%})",
        claim=f"{count} of about {steps} steps changed no weights: their work is lost.",
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.HIGH,
        evidence=(_rows_evidence(series, rows, "rows with skipped steps"), *_notes_evidence(series, notes)),
        recoverable=None,
        fix=Fix("bfloat16 in place of float16; else look at what overflows, at the learning rate and at the batches"),
        verify="No step is skipped after the first hundred",
        falsified_by="They all lie in the first steps, while the loss scale is found",
    )


_SCALE_FOUND_BY = 100


def _memory_growth(series: Series) -> Finding | None:
    memory = series.column("memory_gib")[series.warm_up :]
    memory = memory[np.isfinite(memory)]
    if len(memory) < 2 * FEWEST_ROWS:
        return None
    parts = [float(np.median(part)) for part in np.array_split(memory, 4)]
    grown = parts[-1] - parts[0]
    # A peak that is only found step by step rises too, but less and less.
    settles = parts[3] - parts[2] < grown / 6
    if any(later <= earlier for earlier, later in pairwise(parts)) or settles or grown < _GROWTH_SHARE * parts[0]:
        return None
    return Finding(
        id="log-memory-growth",
        title=f"Memory grows over the run: {parts[0]:.3g} to {parts[-1]:.3g} GiB",
        claim=f"The median of each quarter of the run lies above that of the one before: "
        f"{', '.join(f'{part:.3g}' for part in parts)} GiB.",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.MEDIUM,
        evidence=(_rows_evidence(series, range(series.warm_up, len(series.rows)), "rows with memory"),),
        recoverable=None,
        fix=Fix(
            "Look for tensors kept from step to step (losses in lists, outputs in hooks); "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation; a memory snapshot tells which"
        ),
        verify="The peak of the last quarter is that of the first",
        falsified_by="Sequences or batches grow by design",
    )


def _restarts(series: Series) -> Finding | None:
    back = [place for place in range(1, len(series.rows)) if series.steps[place] < series.steps[place - 1]]
    if not back:
        return None
    places = ", ".join(str(series.steps[place]) for place in back[:6])
    again = int(sum(series.steps[place - 1] - series.steps[place] + 1 for place in back))
    pace = series.step_s[series.warm_up :]
    usual = float(np.median(pace[np.isfinite(pace)])) if np.isfinite(pace).any() else 0.0
    window = usual * float(series.covered.sum()) * 1e6
    lost = usual * again * 1e6
    return Finding(
        id="log-restarts",
        title=f"The run was restarted {len(back)} times and made {again} steps again",
        claim=f"The step number goes back {len(back)} times (to {places}); {again} steps were made again.",
        cause_class=CauseClass.CHECKPOINT,
        confidence=Confidence.HIGH,
        evidence=(_rows_evidence(series, back, "rows after a restart"),),
        recoverable=Recoverable.of_window(0.0, lost, window) if window else None,
        fix=Fix("Find why the run ended (the lines before), and save more often so that less is made again"),
        verify="The next run goes on without going back",
        falsified_by="The file holds several runs that were not meant to go on from each other",
    )


def _errors(series: Series) -> list[Finding]:
    told = {
        Happening.OUT_OF_MEMORY: (
            "log-out-of-memory",
            "The run ran out of device memory",
            CauseClass.MEMORY,
            "Lower the peak: activation checkpointing, a smaller micro-batch, more sharding; a memory snapshot tells "
            "what holds it",
        ),
        Happening.COLLECTIVE_TIMEOUT: (
            "log-collective-timeout",
            "A collective timed out: some rank hung",
            CauseClass.HANG,
            "Give the flight-recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE, TORCH_FR_DUMP_TEMP_FILE): they name "
            "the rank at the root",
        ),
        Happening.ALLOCATION_RETRY: (
            "log-allocation-retries",
            "The allocator flushes its cache within steps",
            CauseClass.MEMORY,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, fixed shapes, or a lower peak",
        ),
    }
    found = []
    for what, (id, title, cause, fix) in told.items():
        if notes := [note for note in series.notes if note.what is what]:
            found.append(
                Finding(
                    id=id,
                    title=f"{title} ({len(notes)} lines, the first after step {notes[0].step})",
                    claim=notes[0].text,
                    cause_class=cause,
                    confidence=Confidence.HIGH,
                    evidence=tuple(_notes_evidence(series, notes)),
                    recoverable=None,
                    fix=Fix(fix),
                    verify="The line is gone from the log of the next run",
                    falsified_by="The line is quoted, not printed by this run",
                )
            )
    return found


def _rows_evidence(series: Series, places: Sequence[int], what: str) -> Evidence:
    chosen = [series.rows[place] for place in places]
    lines = ", ".join(str(row.line) for row in chosen[:8]) + (", …" if len(chosen) > 8 else "")
    return Evidence(
        file=str(series.path),
        events=tuple(f"step {row.step}" for row in chosen[:4]),
        count=len(chosen),
        text=f"{what}, lines {lines}" if chosen else what,
    )


def _notes_evidence(series: Series, notes: Sequence[Note]) -> list[Evidence]:
    by_what = Counter(note.what for note in notes)
    return [
        Evidence(
            file=str(series.path),
            events=tuple(dict.fromkeys(note.text[:80] for note in notes if note.what is what))[:3],
            count=count,
            text=f"{what.value}, first in line {next(note.line for note in notes if note.what is what)}",
        )
        for what, count in by_what.items()
    ]
