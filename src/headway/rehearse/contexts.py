"""How few micro-batches show all that a stage does with many, told from the order in which it does it.

What a stage does with a micro-batch depends on what it did before: whether its blocks are still gathered, whether there
are gradients to add to. So two segments count as the same when they are of one kind, the ones before them are too, and
the same kinds have come before. Micro-batches pass through a stage in turn, so that a short order in which each of
these contexts comes twice is one that a stage can be taken through.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

Label = tuple[str, int, int]
"""Kind, stage and micro-batch (-1: none) of a segment."""
Context = tuple[str, tuple[str, ...], frozenset[str]]
"""Kind of a segment, those of the ones right before it, and all kinds that came before it."""
TWICE = 2
"""A segment that stands for several is seen so often: what it depends on is then told from what changes."""
MOST_IN_FLIGHT = 8
KINDS = (
    "forward", "loss", "backward", "backward_input", "backward_weight", "gather", "gathered", "free", "reduce",
    "micro_batch", "last",
)  # fmt: skip
"""Of segments. With a pipeline those that its schedule asks of a stage, units of FSDP2 being gathered and freed, and
their gradients reduced, all together; without one whole micro-batches, the last of which reduces gradients."""


def contexts(kinds: Iterable[str], depth: int) -> list[Context]:
    """Equal for segments of a stage that do the same. ``depth``: how many before one are looked at."""
    last: tuple[str, ...] = ()
    before = frozenset[str]()
    found: list[Context] = []
    for kind in kinds:
        found.append((kind, last, before))
        last, before = (*last, kind)[-depth:], before | {kind}
    return found


def fewest(order: Sequence[Label], depth: int) -> list[Label]:
    """``order``, of one stage and all micro-batches, with few of them: in it are all contexts, those of several twice.

    ``order`` itself where no shorter one is found.
    """
    many = {kind for kind, _, micro_batch in order if micro_batch >= 0}
    kinds = [kind for kind, _, _ in order]
    short = _walk(kinds, "loss" in many, depth)
    if short is None or len(short) >= len(kinds):
        return list(order)
    counts: Counter[str] = Counter()
    inputs: list[int] = []
    found: list[Label] = []
    for kind in short:
        number = -1
        if kind in many:
            number = counts["backward" if kind == "backward_input" else kind]
            counts["backward" if kind == "backward_input" else kind] += 1
        if kind == "backward_input":
            inputs.append(number)
        elif kind == "backward_weight":
            number = inputs[number]
        found.append((kind, order[0][1], number))
    return found


@dataclass(frozen=True)
class _State:
    """Of a stage, after some segments."""

    depth: int
    last: tuple[str, ...] = ()
    before: frozenset[str] = frozenset()
    forward: int = 0
    """Micro-batches whose loss, or where there is none backward pass, is still to come."""
    lost: int = 0
    """Micro-batches whose backward pass is to come after their loss."""
    weights: int = 0
    """Micro-batches whose weights' gradients are to come."""

    @property
    def idle(self) -> bool:
        return not (self.forward or self.lost or self.weights)

    def after(self, kind: str, has_loss: bool) -> "_State | None":
        """The next state; None where ``kind`` can't be."""
        one = replace(self, last=(*self.last, kind)[-self.depth :], before=self.before | {kind})
        match kind:
            case "forward":
                one = replace(one, forward=one.forward + 1)
            case "loss":
                one = replace(one, forward=one.forward - 1, lost=one.lost + 1)
            case "backward" | "backward_input":
                one = replace(one, lost=one.lost - has_loss, forward=one.forward - (not has_loss))
                one = replace(one, weights=one.weights + (kind == "backward_input"))
            case "backward_weight":
                one = replace(one, weights=one.weights - 1)
        possible = min(one.forward, one.lost, one.weights) >= 0 and one.forward + one.lost <= MOST_IN_FLIGHT
        return one if possible else None


def _walk(kinds: Sequence[str], has_loss: bool, depth: int) -> list[str] | None:
    """A short sequence with the contexts of ``kinds``: always on to the nearest one that is still wanted."""
    every = contexts(kinds, depth)
    counts = Counter(every)
    wanted = Counter({context: min(count, TWICE) for context, count in counts.items()})
    state = _State(depth)
    found: list[str] = []
    for before in dict.fromkeys(context[2] for context in every):
        here = {context for context in counts if context[2] == before and context[0] in before}
        new = [context for context in every if context[2] == before and context[0] not in before]

        def allowed(context: Context, here: set[Context] = here) -> bool:
            return context in here and (counts[context] > 1 or wanted[context] > 0)

        def is_wanted(one: _State, kind: str) -> bool:
            return wanted[kind, one.last, one.before] > 0

        while any(wanted[context] > 0 for context in here):
            path = _search(state, allowed, has_loss, is_wanted)
            if path is None:
                return None
            for kind in path:
                wanted[kind, state.last, before] -= 1
                state = _known(state.after(kind, has_loss))
            found += path
        if not new:
            return found
        leaves = _Leaves(new[0])
        path = _search(state, lambda one: one == leaves.context or allowed(one), has_loss, leaves)  # noqa: B023
        if path is None:
            return None
        for kind in path:
            state = _known(state.after(kind, has_loss))
        found += path
    return found


@dataclass(frozen=True)
class _Leaves:
    """Whether a segment is the first of its kind: gradients are reduced when no micro-batch is under way."""

    context: Context

    def __call__(self, state: _State, kind: str) -> bool:
        new, last, _ = self.context
        return kind == new and state.last == last and (kind != "reduce" or state.idle)


def _known(state: _State | None) -> _State:
    assert state is not None
    return state


def _search(
    state: _State, allowed: Callable[[Context], bool], has_loss: bool, reached: Callable[[_State, str], bool]
) -> list[str] | None:
    """The shortest way, through contexts that are ``allowed``, to a segment that is ``reached``."""
    queue: deque[tuple[_State, list[str]]] = deque([(state, [])])
    seen = {state}
    while queue:
        here, path = queue.popleft()
        for kind in KINDS:
            after = here.after(kind, has_loss) if allowed((kind, here.last, here.before)) else None
            if after is None:
                continue
            if reached(here, kind):
                return [*path, kind]
            if after not in seen and after.before == here.before:
                seen.add(after)
                queue.append((after, [*path, kind]))
    return None
