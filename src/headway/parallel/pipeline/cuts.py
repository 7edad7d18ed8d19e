"""Where the sequence of blocks is cut into stages: so that the slowest stage is as fast as can be."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from headway.errors import UserError


@dataclass(frozen=True)
class BlockCosts:
    """What forward and backward of a micro-batch cost, in any one unit (seconds, FLOPs)."""

    entry: float
    """What comes before the first block, on the first stage: embeddings."""
    blocks: tuple[float, ...]
    exit: float
    """What comes after the last block, on the last stage: the last norm and the head."""


def matrix_elements(modules: Iterable[nn.Module]) -> float:
    """Elements of all matrices that ``modules`` multiply by: the cost of a token until a better one is measured."""
    return float(
        sum(
            parameter.numel()
            for module in modules
            for child in module.modules()
            if not isinstance(child, nn.Embedding)  # rows are looked up
            for parameter in child.parameters(recurse=False)
            if parameter.ndim > 1
        )
    )


def balanced_cuts(costs: BlockCosts, stages: int, first_blocks: int = 1) -> tuple[int, ...]:
    """Blocks of each stage: the costliest stage as cheap as possible, then all as even as possible.

    The first stage has ``first_blocks`` or more, the others one or more; there must be blocks enough for that.
    """
    totals = [0.0, *itertools.accumulate(costs.blocks)]

    def cost(stage: int, first: int, end: int) -> float:
        if stage == 0 and end < first_blocks:
            return math.inf
        ends = costs.entry * (stage == 0) + costs.exit * (stage == stages - 1)
        return totals[end] - totals[first] + ends

    def square_below(before: float, own: float) -> float:
        return before + own * own if own <= slowest else math.inf

    slowest = _best_cuts(cost, len(costs.blocks), stages, max)[0] * (1 + 1e-9)
    return _best_cuts(cost, len(costs.blocks), stages, square_below)[1]


def _best_cuts(
    cost: Callable[[int, int, int], float], blocks: int, stages: int, add: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least sum of ``cost(stage, first, end)`` under ``add``, and the cuts that have it; dynamic programming."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        left = stages - stage - 1
        best = {
            end: min(
                (add(before, cost(stage, first, end)), (*cuts, end - first))
                for first, (before, cuts) in best.items()
                if first < end
            )
            for end in range(stage + 1, blocks - left + 1)
        }
    return best[blocks]


def check_cuts(cuts: Sequence[int], blocks: int, stages: int, first_blocks: int) -> None:
    """Raises UserError unless ``layout.pp_cuts`` shares all of ``blocks`` out, ``first_blocks`` to the first stage."""
    if len(cuts) != stages:
        raise UserError(
            f"layout.pp_cuts = {list(cuts)} is for {len(cuts)} stages, but layout.pp x layout.pp_stages_per_rank makes "
            f"{stages}: name {stages} numbers of blocks, or leave pp_cuts out"
        )
    if sum(cuts) != blocks:
        raise UserError(
            f"layout.pp_cuts = {list(cuts)} adds up to {sum(cuts)} blocks and the model has {blocks}: "
            "make it add up, or leave pp_cuts out"
        )
    if cuts[0] < first_blocks:
        raise UserError(
            f"layout.pp_cuts = {list(cuts)}: the first {first_blocks} blocks take what only the first stage computes: "
            f"let the first number be {first_blocks} or more, or leave pp_cuts out"
        )
