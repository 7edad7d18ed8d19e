"""Findings of a memory snapshot: what holds the peak, holes, errors, growth, and flushes of the cache."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix, Recoverable
from headway.explain.memory_snapshot.categories import Category, own_frame
from headway.explain.memory_snapshot.peak import GIVES_BACK, TAKES, Held, Peak
from headway.explain.memory_snapshot.snapshot import Action, DeviceSnapshot

_UNUSED_SHARE, _HOLES_SHARE, _HOLES_BYTES = 0.10, 0.05, 64 << 20
"""Holes are told where this share of the reserved memory is unused, this of it in holes, and no fewer bytes."""
_ONE_BLOCK_SHARE = 0.20
_GROWTH_SHARE, _GROWTH_PARTS, _GROWTH_SWING = 0.05, 8, 3
_FEWEST_RETURNS = 3

FIXES: dict[Category, Fix] = {
    Category.ACTIVATIONS: Fix(
        "Keep fewer activations: checkpoint the blocks (selective first, then full), a smaller micro-batch with more "
        "accumulation, or divide the sequence over more ranks",
        {"memory.activation_checkpointing": "selective"},
    ),
    Category.RECOMPUTED: Fix(
        "The recomputation of one block holds the peak: checkpoint smaller pieces (each block, or attention and MLP "
        "apart), or take a smaller micro-batch"
    ),
    Category.PARAMETERS: Fix("Divide the parameters over more ranks, or hold them in bfloat16", {}),
    Category.GRADIENTS: Fix("Divide the gradients over more ranks, and reduce them in bfloat16 where that is enough"),
    Category.BACKWARD: Fix(
        "The backward pass holds the peak: divide gradients over more ranks, free the loss's logits early (a chunked "
        "or fused cross-entropy), or take a smaller micro-batch"
    ),
    Category.OPTIMIZER: Fix(
        "Divide the optimizer's state over more ranks, hold it in 8 bits, or leave it on the host; foreach=False or "
        "fused=True spares the temporary copies of its step"
    ),
    Category.COMMUNICATION: Fix(
        "Fewer gathered parameters at once: reshard after forward, no explicit prefetch, smaller wrapped units"
    ),
    Category.DATA: Fix("Move batches to the device one at a time; keep decoded samples on the host"),
}


def memory_findings(snapshot: DeviceSnapshot, peak: Peak, held_by: Counter[Category]) -> list[Finding]:
    """All findings of one device."""
    found = [
        _out_of_memory(snapshot, peak),
        _holder(snapshot, peak, held_by),
        _one_block(snapshot, peak),
        _holes(snapshot, peak),
        _growth(snapshot, peak),
        _returned_segments(snapshot),
    ]
    return [finding for finding in found if finding is not None]


def _holder(snapshot: DeviceSnapshot, peak: Peak, held_by: Counter[Category]) -> Finding | None:
    """The purpose that holds most of what can be told."""
    told = Counter({category: size for category, size in held_by.items() if category in FIXES})
    if not told:
        return None
    (category, size), *_ = told.most_common(1)
    listed = ", ".join(f"{gib(size)} {category.value}" for category, size in held_by.most_common())
    return Finding(
        id=f"memory-peak-{category.value.replace(' ', '-')}",
        title=f"{category.value.capitalize()} hold {gib(size)} of the memory's peak of {gib(peak.allocated)}",
        claim=f"At the peak {gib(peak.allocated)} are in use of {gib(peak.reserved)} reserved: {listed}.",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH if size > 0.5 * peak.allocated else Confidence.MEDIUM,
        evidence=(_at_peak(snapshot, peak), *_largest_stacks(snapshot, peak.held, 4)),
        recoverable=None,
        fix=FIXES[category],
        verify=f"A snapshot after the change shows a peak lower by about what {category.value} held less",
        falsified_by="The peak stays: another purpose took its place, at another moment of the step",
    )


def _one_block(snapshot: DeviceSnapshot, peak: Peak) -> Finding | None:
    """A single tensor that stands out of the peak."""
    recorded = [block for block in peak.held if block.recorded]
    largest = max(recorded, key=lambda block: block.size, default=None)
    if largest is None or largest.size < _ONE_BLOCK_SHARE * peak.allocated:
        return None
    where = own_frame(largest.stack)
    return Finding(
        id="memory-one-tensor",
        title=f"One tensor of {gib(largest.size)} makes up {largest.size / peak.allocated:.0%} of the peak",
        claim=f"A single allocation of {gib(largest.size)} is in use at the peak of {gib(peak.allocated)}"
        + (f"; it is made at {where}." if where else "."),
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH,
        evidence=(_stack_evidence(snapshot, largest.stack, largest.size, 1),),
        recoverable=None,
        fix=Fix(
            "Do not make it whole: logits and their loss in chunks (or a fused linear cross-entropy), attention "
            "without the matrix of scores, casts of large tensors in place of copies"
        ),
        verify="The allocation is gone from the next snapshot and the peak is lower by most of its size",
        falsified_by="The tensor is a parameter or a buffer that is held throughout",
    )


def _holes(snapshot: DeviceSnapshot, peak: Peak) -> Finding | None:
    lost = peak.in_split_segments
    unused = lost + peak.in_empty_segments
    if lost < max(_HOLES_SHARE * peak.reserved, _HOLES_BYTES) or unused < _UNUSED_SHARE * peak.reserved:
        return None
    expandable = snapshot.settings.get("expandable_segments") is True
    change = (
        "Lower the variety of sizes (fixed shapes, padded buckets), or release caches before the phase that needs most"
        if expandable
        else "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; else fixed shapes, or max_split_size_mb for big blocks"
    )
    return Finding(
        id="memory-fragmentation",
        title=f"{gib(lost)} of {gib(peak.reserved)} reserved lie in holes between blocks in use",
        claim=f"At the peak {gib(peak.allocated)} are in use and {gib(peak.reserved)} reserved. {gib(lost)} are unused "
        f"inside segments that hold blocks in use, where only requests that fit a hole can have them (the largest is "
        f"{gib(peak.largest_hole)}); {gib(peak.in_empty_segments)} are empty segments, which are given back on need.",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH,
        evidence=(_at_peak(snapshot, peak),),
        recoverable=None,
        fix=Fix(change),
        verify="Reserved minus allocated memory at the peak (torch.cuda.memory_stats) falls",
        falsified_by="It stays the same with expandable segments: the holes are within pages in use",
    )


def _out_of_memory(snapshot: DeviceSnapshot, peak: Peak) -> Finding | None:
    errors = [action for action in snapshot.history if action.what == "oom"]
    if not errors:
        return None
    wanted = errors[0]
    free = wanted.device_free or 0
    holes = peak.in_split_segments + peak.in_empty_segments
    scattered = holes + free >= wanted.size
    why = (
        "Enough is unused, but scattered over segments in use: this is fragmentation."
        if scattered
        else "There is not enough unused memory anywhere: less must be in use."
    )
    return Finding(
        id="memory-out-of-memory",
        title=f"The allocator failed {len(errors)} times, first for {gib(wanted.size)}",
        claim=f"{gib(wanted.size)} were asked for; the device had {gib(free)} free and {gib(holes)} of the reserved "
        f"memory were unused at the peak. {why}",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH,
        evidence=(
            _actions_evidence(snapshot, errors),
            _stack_evidence(snapshot, wanted.stack, wanted.size, len(errors)),
        ),
        recoverable=None,
        fix=Fix("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then what lowers the peak (the other findings)")
        if scattered
        else Fix("What lowers the peak: see the finding on what holds it", {"memory.activation_checkpointing": "full"}),
        verify="The step that failed passes, and torch.cuda.memory_stats counts no num_ooms",
        falsified_by="The error comes from memory outside of PyTorch: NCCL's buffers, another process on the device",
    )


def _growth(snapshot: DeviceSnapshot, peak: Peak) -> Finding | None:
    """The least in use over consecutive parts of the history rises all the way: what is made is not all freed."""
    parts = [part for part in np.array_split(peak.curve, _GROWTH_PARTS) if len(part)]
    lows = [int(part.min()) for part in parts]
    if len(parts) < _GROWTH_PARTS or any(later <= earlier for earlier, later in pairwise(lows)):
        return None
    grown = lows[-1] - lows[0]
    # Within one forward pass memory rises too; over steps it goes up and down by more than it grows.
    swing = float(np.median([np.ptp(part) for part in parts]))
    if grown < _GROWTH_SHARE * peak.allocated or swing < _GROWTH_SWING * grown / _GROWTH_PARTS:
        return None
    kept = [block for block in peak.held if block.recorded]
    return Finding(
        id="memory-growth",
        title=f"Memory grows by {gib(grown)} over the history without being freed",
        claim=f"The least in use in each eighth of the history rises from {gib(lows[0])} to {gib(lows[-1])}.",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.MEDIUM,
        evidence=(_at_peak(snapshot, peak), *_largest_stacks(snapshot, kept, 4)),
        recoverable=None,
        fix=Fix(
            "Look for tensors that are kept from step to step: losses appended to a list without .item() or .detach(), "
            "outputs held by hooks, caches without bound"
        ),
        verify="Over twice as many steps the least in use per step stays the same",
        falsified_by="The history covers less than a step: the forward pass alone grows so",
    )


def _returned_segments(snapshot: DeviceSnapshot) -> Finding | None:
    """Segments given back and taken again: each time the device waits for cudaFree and cudaMalloc."""
    bursts = _bursts(snapshot.history)
    if len(bursts) < _FEWEST_RETURNS:
        return None
    given = [action for burst in bursts for action in burst if action.what in GIVES_BACK]
    taken = [action for burst in bursts for action in burst if action.what in TAKES]
    frames = [frame for action in given for frame in action.stack if isinstance(frame, dict)]
    asked = any("empty_cache" in str(frame.get("name")) for frame in frames)
    times = [action.time_us for action in snapshot.history if action.time_us is not None]
    window = max(times) - min(times) if times else 0
    spent = sum(
        max(action.time_us or 0 for action in burst) - min(action.time_us or 0 for action in burst) for burst in bursts
    )
    why = (
        "torch.cuda.empty_cache() is called there" if asked else "the device's memory is full, and the cache is flushed"
    )
    return Finding(
        id="memory-cache-flushes",
        title=f"{gib(sum(action.size for action in given))} of cached segments are given back and taken again",
        claim=f"{len(bursts)} times segments are given back to the device and memory is taken again right after "
        f"({len(given)} cudaFree, {len(taken)} cudaMalloc): {why}. Each waits for the device.",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH,
        evidence=(_actions_evidence(snapshot, [*given, *taken]),),
        recoverable=Recoverable.of_window(spent / 2, spent, window) if window else None,
        fix=Fix("Take torch.cuda.empty_cache() out of the loop")
        if asked
        else Fix(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and fixed shapes; else a lower peak (other findings)"
        ),
        verify="torch.cuda.memory_stats: num_alloc_retries stays 0, num_device_free stops rising",
        falsified_by="The returns are those between phases (validation, sampling), not of every step",
    )


def _bursts(history: Sequence[Action]) -> list[list[Action]]:
    """Runs of segments given back and then taken, with at most a few other actions in between."""
    bursts: list[list[Action]] = []
    current: list[Action] = []
    since = 0
    for action in history:
        if action.what in GIVES_BACK:
            if current and current[-1].what in TAKES:
                bursts.append(current)
                current = []
            current.append(action)
            since = 0
        elif action.what in TAKES and current:
            current.append(action)
        elif current:
            since += 1
            if current[-1].what in TAKES or since > 8:
                if current[-1].what in TAKES:
                    bursts.append(current)
                current = []
    if current and current[-1].what in TAKES:
        bursts.append(current)
    return bursts


def _at_peak(snapshot: DeviceSnapshot, peak: Peak) -> Evidence:
    when = float(peak.time_us) if peak.time_us is not None else None
    return Evidence(
        file=str(snapshot.path),
        events=("segments", "device_traces"),
        count=len(peak.held),
        text=f"device {snapshot.device}: {len(peak.held)} blocks in use after {peak.place} of "
        f"{len(snapshot.history)} recorded actions",
        start_us=when,
        end_us=when,
    )


def _largest_stacks(snapshot: DeviceSnapshot, held: Sequence[Held], most: int) -> list[Evidence]:
    """The places in the program whose blocks take most."""
    by_place: dict[str, list[Held]] = defaultdict(list)
    for block in held:
        if place := own_frame(block.stack):
            by_place[place].append(block)
    ordered = sorted(by_place.items(), key=lambda item: -sum(block.size for block in item[1]))
    return [
        Evidence(str(snapshot.path), (place,), len(blocks), f"{gib(sum(block.size for block in blocks))} at the peak")
        for place, blocks in ordered[:most]
    ]


def _stack_evidence(snapshot: DeviceSnapshot, stack: Sequence[object], size: int, count: int) -> Evidence:
    place = own_frame(stack)
    return Evidence(str(snapshot.path), (place,) if place else (), count, f"{gib(size)} each, device {snapshot.device}")


def _actions_evidence(snapshot: DeviceSnapshot, actions: Sequence[Action]) -> Evidence:
    times = [action.time_us for action in actions if action.time_us is not None]
    return Evidence(
        file=str(snapshot.path),
        events=tuple(dict.fromkeys(action.what for action in actions)),
        count=len(actions),
        text=f"{gib(sum(action.size for action in actions))} on device {snapshot.device}",
        start_us=float(min(times)) if times else None,
        end_us=float(max(times)) if times else None,
    )


def gib(size: int) -> str:
    """Bytes for a reader: ``7.70 GiB``, ``244 MiB``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.4g} MiB"
