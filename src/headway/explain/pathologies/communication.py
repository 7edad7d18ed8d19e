"""Communication that nothing hides, by what it is; small messages; links that are slow for some."""

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from headway.explain.collectives import Aligned
from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix, Recoverable
from headway.explain.pathologies.evidence import is_worth, percent
from headway.explain.rank_part import RankPart
from headway.explain.replay import Change

EXPOSED = 0.02
"""Share of the window from which exposed communication of a kind is told."""
SMALL_BYTES = 1 << 20
MANY_SMALL = 20
"""Small messages of a kind in a step."""
SLOW, SLOW_NS = 2.0, 200_000
"""A transfer this many times as long as the median of its size, and longer by that much, went over a slow link."""
_FIXES = {
    "all_gather": Fix(
        "Ask for the next blocks' parameters earlier (set_modules_to_forward_prefetch, a larger wrapped unit), keep "
        "them after forward where memory allows, or give each step more compute.",
        {"layout.prefetch": 2, "layout.reshard_after_forward": False},
    ),
    "reduce_scatter": Fix(
        "Reduce in bfloat16, shard within the node and replicate between nodes, and accumulate more micro-batches.",
        {"precision.reduce": "bfloat16"},
    ),
    "all_reduce": Fix(
        "Buckets of a size that leaves a short last one, bfloat16 gradients, or more compute between reductions."
    ),
}
_OTHER_FIX = Fix("Overlap it with compute that does not depend on it, or send less: coarser groups, fewer bytes.")

Integers = NDArray[np.int64]


def find_communication(parts: Sequence[RankPart], aligned: Sequence[Aligned]) -> Iterator[Finding]:
    """Findings about communication of all ranks. Waiting for others is told apart where ranks could be aligned."""
    for collective in sorted({key[1] for part in parts if part.collectives for key in part.collectives.key}):
        yield from _exposed(collective, parts, aligned)
        yield from _small(collective, parts)
    for one in aligned:
        yield from _slow_links(parts, one)
    yield from _spread_over_nodes(parts)


def waits_of(part: RankPart, aligned: Sequence[Aligned]) -> Integers:
    """Waiting within each collective of a rank as far as it is known, else 0: int64, ``[collectives]``."""
    assert part.collectives is not None
    waits = np.zeros(len(part.collectives.key), dtype=np.int64)
    order = np.argsort(part.collectives.span, kind="stable")
    for one in aligned:
        if part.rank in one.ranks:
            column = one.ranks.index(part.rank)
            place = order[np.searchsorted(part.collectives.span[order], one.span[:, column])]
            waits[place] = one.wait_ns[:, column]
    return waits


def less_of_spans(part: RankPart, spans: Integers, less_ns: Integers) -> Change:
    """The spans (places in the rank's Timeline) take so much less of the device's time."""
    graph = part.graph
    assert graph is not None
    less = np.zeros(len(graph), dtype=np.int64)
    order = np.argsort(spans, kind="stable")
    if len(spans):
        at = np.minimum(np.searchsorted(spans[order], graph.places), len(spans) - 1)
        found = graph.on_device & (spans[order][at] == graph.places)
        less[found] = less_ns[order][at[found]]
    return Change(device_ns=less)


def _exposed(collective: str, parts: Sequence[RankPart], aligned: Sequence[Aligned]) -> Iterator[Finding]:
    gains, evidence, exposed_us, waits_us, late, total = [], [], [], [], 0, 0
    for part in parts:
        assert part.collectives is not None
        assert part.graph is not None
        mine = np.array([key[1] == collective for key in part.collectives.key], dtype=bool)
        if not mine.any():
            continue
        waits = waits_of(part, aligned)
        exposed = np.maximum(part.exposed_ns, 0)
        lost = np.where(mine, np.maximum(exposed - waits, 0), 0)
        exposed_us.append(int(exposed[mine].sum()) / 1000)
        waits_us.append(int(np.minimum(waits, exposed)[mine].sum()) / 1000)
        late += int((part.follows_compute & mine & (exposed > 0)).sum())
        total += int(mine.sum())
        gains.append((part, part.graph.gain(less_of_spans(part, part.collectives.span, lost))))
        evidence.append(_evidence(part, mine, f"{exposed_us[-1] / 1000:,.2f} ms exposed"))
    if not gains:
        return
    window = median(part.window_us for part, _ in gains)
    transfer = median(np.array(exposed_us) - np.array(waits_us))
    if transfer < EXPOSED * window or sum(waits_us) > 0.5 * sum(exposed_us):
        return
    gain = Recoverable.of_window(
        median(gain.low_us for _, gain in gains), median(gain.high_us for _, gain in gains), window
    )
    if not is_worth(gain, window):
        return
    name = collective if len(collective) < 24 and collective.replace("_", "").isalpha() else "communication"
    too_late = collective == "all_gather" and total >= 4 and 2 * late >= total
    aligned_text = (
        f"Waiting for other ranks is left out ({sum(waits_us) / 1000:,.1f} ms)."
        if aligned
        else "How much of it is waiting for other ranks can't be told from these files."
    )
    late_text = f" {late} of {total} begin only when compute has ended, as if asked for too late." if too_late else ""
    yield Finding(
        id="late-all-gather" if too_late else f"exposed-{name.replace('_', '-')}",
        title=f"{name.replace('_', '-')} is not hidden behind compute",
        claim=(
            f"{transfer / 1000:,.1f} ms of {name.replace('_', '-')} ({percent(transfer / window)} of the window) run "
            f"while nothing computes. {aligned_text}{late_text}"
        ),
        cause_class=CauseClass.COMMUNICATION,
        confidence=Confidence.MEDIUM if aligned else Confidence.LOW,
        evidence=tuple(evidence),
        recoverable=gain if aligned else Recoverable.of_window(0, gain.high_us, window),
        fix=_FIXES.get(collective, _OTHER_FIX),
        verify=f"Exposed time of {name.replace('_', '-')} falls while its total stays.",
        falsified_by="Traces of all ranks show that the time is spent waiting for one of them.",
    )


def _small(collective: str, parts: Sequence[RankPart]) -> Iterator[Finding]:
    part = max(parts, key=lambda one: one.window_us)
    assert part.collectives is not None
    assert part.graph is not None
    mine = np.array([key[1] == collective for key in part.collectives.key], dtype=bool)
    small = mine & (part.collectives.bytes >= 0) & (part.collectives.bytes < SMALL_BYTES)
    each = int(small.sum()) / part.step_count
    if each < MANY_SMALL:
        return
    exposed = np.where(small, np.maximum(part.exposed_ns, 0), 0)
    gain = part.graph.gain(less_of_spans(part, part.collectives.span, exposed * 9 // 10))
    if not is_worth(gain, part.window_us):
        return
    sizes = part.collectives.bytes[small]
    yield Finding(
        id="small-messages",
        title=f"{collective.replace('_', '-')} sends many small messages",
        claim=(
            f"{each:,.0f} messages a step of {np.median(sizes) / 1024:,.0f} KiB (median): their latency, "
            f"{int(exposed.sum()) / 1e6:,.2f} ms of it exposed, is paid for each."
        ),
        cause_class=CauseClass.COMMUNICATION,
        confidence=Confidence.MEDIUM,
        evidence=(_evidence(part, small, f"smaller than {SMALL_BYTES >> 20} MiB"),),
        recoverable=Recoverable.of_window(0.3 * gain.low_us, gain.high_us, part.window_us),
        fix=Fix("Coalesce: larger buckets (bucket_cap_mb), flattened tensors, one reduction of all norms or metrics."),
        verify="The number of messages falls tenfold, and their exposed time with it.",
        falsified_by="The messages depend on each other and can't be sent together.",
    )


def _slow_links(parts: Sequence[RankPart], aligned: Aligned) -> Iterator[Finding]:
    """Transfers of one collective and size that take much longer in some groups or at some times."""
    transfer = aligned.transfer_ns
    kinds: dict[tuple[str, int], list[int]] = {}
    for place, (key, size) in enumerate(zip(aligned.key, aligned.bytes.tolist(), strict=True)):
        if size >= 0:
            kinds.setdefault((key[1], size), []).append(place)
    slow: list[int] = []
    excess = 0
    for places in kinds.values():
        usual = median(transfer[places].tolist())
        over = [at for at in places if transfer[at] > SLOW * usual and transfer[at] - usual > SLOW_NS]
        if len(places) >= 4 and 4 * len(over) <= len(places):
            slow += over
            excess += sum(int(transfer[at] - usual) for at in over)
    window = median(part.window_us for part in parts)
    if not slow or excess / 1000 < 0.01 * window:
        return
    groups = sorted({aligned.key[at][0] for at in slow})
    times = aligned.start_ns[slow]
    yield Finding(
        id="slow-link",
        title="Some transfers are much slower than others of their size",
        claim=(
            f"{len(slow)} collectives ({', '.join(groups[:4])}) take {SLOW:g} times or more of what others of the same "
            f"kind and size take after the last rank has come: {excess / 1e6:,.2f} ms in all."
        ),
        cause_class=CauseClass.COMMUNICATION,
        confidence=Confidence.MEDIUM,
        evidence=(
            Evidence(
                parts[0].file,
                tuple(sorted({aligned.key[at][1] for at in slow})),
                len(slow),
                "transfers after the last arrival",
                aligned.ranks,
                int(times.min()) / 1000,
                int(aligned.end_ns[slow].max()) / 1000,
            ),
        ),
        recoverable=Recoverable.of_window(0, excess / 1000, window),
        fix=Fix(
            "Look at the links of these ranks: NIC and cable errors, rails, adaptive routing, NCCL_IB_* and topology."
        ),
        verify="A bandwidth test between these ranks shows the slow pair; the excess goes when it is replaced.",
        falsified_by="The slow ones move with the step or the time of day, not with the ranks: congestion.",
    )


def _spread_over_nodes(parts: Sequence[RankPart]) -> Iterator[Finding]:
    """The group that sends most reaches over nodes though it would fit into one, while a lesser one stays inside."""
    part = max(parts, key=lambda one: one.window_us)
    assert part.collectives is not None
    assert part.graph is not None
    groups = np.array([key[0].removeprefix("group ") for key in part.collectives.key])
    sent = {
        name: int(part.collectives.bytes[(groups == name) & (part.collectives.bytes > 0)].sum())
        for name in part.placements
    }
    inside = [sent[name] for name, placement in part.placements.items() if placement.nodes == 1 and sent[name]]
    most = max(sent, key=lambda name: sent[name], default="")
    if not inside or not part.placements[most].is_spread:
        return
    mine = groups == most
    exposed = np.where(mine, np.maximum(part.exposed_ns, 0), 0)
    spans = part.collectives.span
    least = part.graph.gain(less_of_spans(part, spans, exposed // 2))
    high = part.graph.gain(less_of_spans(part, spans, exposed * 9 // 10))
    gain = Recoverable.of_window(least.low_us, high.high_us, part.window_us)
    if exposed.sum() / 1000 < EXPOSED * part.window_us or not is_worth(gain, part.window_us):
        return
    placement = part.placements[most]
    yield Finding(
        id="spread-over-nodes",
        title="The group that sends most reaches over nodes",
        claim=(
            f"Group {most} of {placement.ranks} ranks on {placement.nodes} nodes sends {sent[most] / 1e9:,.3g} GB from "
            f"each rank; groups inside a node of {placement.devices_per_node} devices send {max(inside) / 1e9:,.3g} GB "
            f"at most. {exposed.sum() / 1e6:,.2f} ms of it run while nothing computes."
        ),
        cause_class=CauseClass.COMMUNICATION,
        confidence=Confidence.MEDIUM,
        evidence=(_evidence(part, mine, "over the network between nodes"),),
        recoverable=gain,
        fix=Fix(
            "Number the ranks so that this axis varies fastest (the last dimension of the mesh): tensor and expert "
            "parallelism inside a node, replicas and pipeline stages between nodes."
        ),
        verify="The group's transfers take as long as others of their size inside a node.",
        falsified_by="The links between these nodes are as fast as those inside (one NVLink domain).",
    )


def _evidence(part: RankPart, mine: NDArray[np.bool_], text: str) -> Evidence:
    assert part.collectives is not None
    names = [name for name, kept in zip(part.collectives.names, mine.tolist(), strict=True) if kept]
    return Evidence(
        part.file,
        tuple(dict.fromkeys(name[:120] for name in names))[:4],
        len(names),
        text,
        (part.rank,),
        int(part.collectives.start_ns[mine].min()) / 1000,
        int(part.collectives.end_ns[mine].max()) / 1000,
    )
