"""What of a pipeline's step is idle: measured from its Timeline, from its order alone, and by the closed formula."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

from headway.timeline import Timeline, breakdown
from schedules.running import Span

UNITS = {"forward": 1, "backward_input": 1, "backward_weight": 1, "backward": 2}
"""How long each kind of work is made to last."""


def idle_share(timeline: Timeline) -> float:
    """Idle time of all ranks over theirs from the step's first span to its last."""
    window = int(timeline.start_ns.min()), int(timeline.end_ns.max())
    parts = [breakdown(timeline.of_rank(rank), window) for rank in timeline.ranks()]
    return sum(part.idle_ns for part in parts) / sum(part.window_ns for part in parts)


def played(spans: Sequence[Span], unit_ns: int) -> list[Span]:
    """The same orders on the same ranks, where all work lasts exactly its units and transfers take no time."""
    stages = max(span.stage for span in spans) + 1
    ordered = sorted(spans, key=lambda span: span.start_ns)
    waiting = {rank: _actions([s for s in ordered if s.rank == rank]) for rank in sorted({s.rank for s in spans})}
    free = dict.fromkeys(waiting, 0)
    ends: dict[tuple[str, int, int], int] = {}
    done: list[Span] = []
    while any(waiting.values()):
        for rank, own in waiting.items():
            while own and None not in (needed := [_ready(span, stages, ends) for span in own[0]]):
                free[rank] = max([free[rank], *(at for at in needed if at is not None)])
                action = own.pop(0)
                for span in action:
                    done.append(span._replace(start_ns=free[rank], duration_ns=UNITS[span.phase] * unit_ns))
                    free[rank] += UNITS[span.phase] * unit_ns
                for span in action:
                    if span.phase != "backward_weight":
                        direction = "forward" if span.phase == "forward" else "backward"
                        ends[direction, span.stage, span.micro_batch] = free[rank]
    return done


def _actions(own: Sequence[Span]) -> list[list[Span]]:
    """A rank's spans by action."""
    return [list(action) for _, action in itertools.groupby(own, key=lambda span: span.action)]


def _ready(span: Span, stages: int, ends: dict[tuple[str, int, int], int]) -> int | None:
    """When what a span needs from other stages is there; None: not yet known."""
    if span.phase == "forward":
        return ends.get(("forward", span.stage - 1, span.micro_batch)) if span.stage else 0
    if span.phase == "backward_weight" or span.stage == stages - 1:
        return 0  # needs only what its own rank did before
    return ends.get(("backward", span.stage + 1, span.micro_batch))


def in_flight(spans: Sequence[Span]) -> dict[int, float]:
    """By rank: the most micro-batches whose activations it holds at once, each of its stages counting its share."""
    stages_of_rank = {rank: len({s.stage for s in spans if s.rank == rank}) for rank in {s.rank for s in spans}}
    most = {}
    for rank, stages in stages_of_rank.items():
        own = [span for span in spans if span.rank == rank]
        last = {(s.stage, s.micro_batch): s.start_ns + s.duration_ns for s in sorted(own, key=lambda s: s.start_ns)}
        begins = [(span.start_ns, 1) for span in own if span.phase == "forward"]
        changes = sorted([*begins, *((end, -1) for end in last.values())])
        held = [sum(change for _, change in changes[: place + 1]) for place in range(len(changes))]
        most[rank] = max(held) / stages
    return most


Bubble = Callable[[int, int], Fraction]
"""(ranks p, stages a rank v) -> idle units of a rank, where forward, gradients of inputs and of weights of all its
stages together last one unit each (F = I = W = 1)."""


def gpipe(p: int, v: int) -> Fraction:
    """(p - 1)(F + I + W): Huang et al. 2019, GPipe, section 2.3."""
    return Fraction(3 * (p - 1))


def one_forward_one_backward(p: int, v: int) -> Fraction:
    """As GPipe's, with p micro-batches in flight in place of all: Narayanan et al. 2021, PipeDream-Flush."""
    return Fraction(3 * (p - 1))


def interleaved(p: int, v: int) -> Fraction:
    """(p - 1)(F + I + W) / v: Narayanan et al. 2021, Megatron-LM, section 2.2."""
    return Fraction(3 * (p - 1), v)


def interleaved_zero_bubble(p: int, v: int) -> Fraction:
    """(p - 1)(F + I - W) / v: ZB-H1 of Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3, interleaved."""
    return Fraction(p - 1, v)


def zero_bubble_v(p: int, v: int) -> Fraction:
    """(p - 1) F / v: each rank works without a gap (Qi et al. 2023, section 6), but rank r begins r forwards late.

    The paper counts a rank's time from its own first work; a step ends for all ranks at once.
    """
    return Fraction(p - 1, v)


def dualpipev(p: int, v: int) -> Fraction:
    """(p - 1)(FB + B - 3 W) of one of the v = 2 stages, with B = I + W: DeepSeek, DualPipe, table in its README.

    FB is a forward and a backward as one action. Where they overlap it is shorter than both; torch runs one after the
    other, FB = F + I + W, but still awaits and sends what both need and make together.
    """
    return Fraction((p - 1) * (3 + 2 - 3), v)


BUBBLES: dict[str, Bubble] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zbv": zero_bubble_v,
    "dualpipev": dualpipev,
}


def formula_share(schedule: str, ranks: int, stages: int, micro_batches: int) -> float:
    """Idle units over all: a rank works 3 units a micro-batch."""
    idle = BUBBLES[schedule](ranks, stages)
    return float(idle / (idle + 3 * micro_batches))
