"""Which blocks are on which stage, which stages are on which rank, and what a schedule asks of a run."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from headway.errors import UserError
from headway.parallel.pipeline.cuts import BlockCosts, balanced_cuts, check_cuts, matrix_elements
from headway.parallel.pipeline.families import Pipelined, find_pipelined
from headway.recipe import LayoutRecipe


@dataclass(frozen=True)
class ScheduleKind:
    """Facts of a schedule of torch.distributed.pipelining."""

    torch_name: str
    """As ``get_schedule_class`` knows it."""
    stages_per_rank: tuple[int, ...] | None
    """What it runs with; None: two or more."""
    takes: Callable[[int, int], bool]
    """(ranks, micro-batches) -> whether it can be made."""
    asks_for: str
    """``takes`` in words."""
    v_shaped: bool = False
    """Rank r has stages r and 2·ranks - 1 - r, so that the first rank also has the last stage."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed at different times, to fill bubbles with the latter.

    Fully checkpointed blocks are then recomputed twice.
    """


def _any_number(ranks: int, micro_batches: int) -> bool:
    return True


def _one_a_rank(ranks: int, micro_batches: int) -> bool:
    return micro_batches >= ranks


def _one_a_stage(ranks: int, micro_batches: int) -> bool:
    return micro_batches >= 2 * ranks


def _equal_rounds(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


ROUNDS = "a number that divides into rounds of at least layout.pp"
SCHEDULES = {
    "gpipe": ScheduleKind("GPipe", (1,), _any_number, "any number"),
    "1f1b": ScheduleKind("1F1B", (1,), _one_a_rank, "at least layout.pp"),
    "interleaved_1f1b": ScheduleKind("Interleaved1F1B", None, _equal_rounds, ROUNDS),
    "interleaved_zero_bubble": ScheduleKind("InterleavedZeroBubble", None, _equal_rounds, ROUNDS, splits_backward=True),
    "zbv": ScheduleKind("ZBVZeroBubble", (2,), _any_number, "any number", v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleKind(
        "DualPipeV", (2,), _one_a_stage, "at least 2 x layout.pp", v_shaped=True, splits_backward=True
    ),
}


@dataclass(frozen=True)
class PipelinePlan:
    """Stages on ranks, blocks on stages."""

    schedule: str
    """A key of SCHEDULES."""
    ranks: int
    cuts: tuple[int, ...]
    """Blocks of each stage, in the order of the model."""

    @property
    def kind(self) -> ScheduleKind:
        """The schedule's facts."""
        return SCHEDULES[self.schedule]

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return len(self.cuts)

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that has ``stage``."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind.v_shaped and lap % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of ``rank``, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def blocks_of(self, stage: int) -> range:
        """Numbers of the blocks of ``stage``."""
        ends = [0, *itertools.accumulate(self.cuts)]
        return range(ends[stage], ends[stage + 1])


def plan_pipeline(
    layout: LayoutRecipe,
    module: nn.Module,
    *,
    micro_batches: int,
    compiled: bool,
    checkpointing: str = "none",
    costs: Callable[[], BlockCosts] | None = None,
) -> PipelinePlan:
    """The plan for ``layout`` (pp > 1) of ``module``, which must still be whole and may be on meta.

    ``micro_batches`` of one rank and step; ``compiled``: blocks go through torch.compile; ``checkpointing``: of
    activations, as the recipe calls it; ``costs``: measured or counted, to balance stages by, asked for when the recipe
    has no cuts (None: matrix elements). Raises UserError for what can't work, with what can.
    """
    kind = SCHEDULES[layout.pp_schedule]
    stages = layout.pp * _stages_per_rank(layout, kind)
    _check_micro_batches(layout, kind, micro_batches)
    reshards_after_forward(layout)
    if kind.splits_backward:
        _check_backward_can_be_split(layout, compiled, checkpointing)
    pipelined = find_pipelined(module)
    blocks = [block for _, block in pipelined.blocks()]
    first_blocks = pipelined.recipe.first_blocks
    most = len(blocks) - first_blocks + 1
    if stages > most:
        raise UserError(
            f"layout.pp x layout.pp_stages_per_rank = {stages} stages, but the {len(blocks)} blocks of "
            f"{type(pipelined.model).__name__} make {most} at most: set layout.pp to "
            f"{max(1, most // (stages // layout.pp))} or less"
        )
    if layout.pp_cuts is not None:
        check_cuts(layout.pp_cuts, len(blocks), stages, first_blocks)
        return PipelinePlan(layout.pp_schedule, layout.pp, tuple(layout.pp_cuts))
    known = _elements(pipelined) if costs is None else costs()
    return PipelinePlan(layout.pp_schedule, layout.pp, balanced_cuts(known, stages, first_blocks))


def _elements(pipelined: Pipelined) -> BlockCosts:
    return BlockCosts(
        entry=matrix_elements(pipelined.ends([*pipelined.recipe.entry])),
        blocks=tuple(matrix_elements([block]) for _, block in pipelined.blocks()),
        exit=matrix_elements(pipelined.ends([*pipelined.recipe.exit])),
    )


def _stages_per_rank(layout: LayoutRecipe, kind: ScheduleKind) -> int:
    asked = layout.pp_stages_per_rank
    if asked == "auto":
        return kind.stages_per_rank[0] if kind.stages_per_rank else 2
    if kind.stages_per_rank is None and asked < 2:
        raise UserError(
            f"layout.pp_schedule = {layout.pp_schedule!r} interleaves two stages or more on each rank, and "
            f'layout.pp_stages_per_rank = {asked}: set it to 2, or layout.pp_schedule = "1f1b"'
        )
    if kind.stages_per_rank is not None and asked not in kind.stages_per_rank:
        other = ', or layout.pp_schedule = "interleaved_1f1b"' if asked > 1 else ', or layout.pp_schedule = "1f1b"'
        raise UserError(
            f"layout.pp_schedule = {layout.pp_schedule!r} has {kind.stages_per_rank[0]} stage(s) on each rank, and "
            f"layout.pp_stages_per_rank = {asked}: set it to {kind.stages_per_rank[0]}{other}"
        )
    return asked


def _check_micro_batches(layout: LayoutRecipe, kind: ScheduleKind, micro_batches: int) -> None:
    if kind.takes(layout.pp, micro_batches):
        return
    below = [n for n in range(micro_batches - 1, 0, -1) if kind.takes(layout.pp, n)][:1]
    above = next(n for n in itertools.count(micro_batches + 1) if kind.takes(layout.pp, n))
    raise UserError(
        f"layout.pp_schedule = {layout.pp_schedule!r} with layout.pp = {layout.pp} asks for {kind.asks_for} "
        f"micro-batches a rank, and run.global_batch makes {micro_batches}: change run.global_batch or "
        f"run.micro_batch so that it makes {' or '.join(map(str, [*below, above]))}"
    )


def _check_backward_can_be_split(layout: LayoutRecipe, compiled: bool, checkpointing: str) -> None:
    apart = f"layout.pp_schedule = {layout.pp_schedule!r} computes the gradients of inputs and weights apart"
    if compiled:
        raise UserError(
            f"{apart}, which compiled blocks can't: set run.compile = false, or "
            'layout.pp_schedule = "interleaved_1f1b"'
        )
    if checkpointing == "selective":
        raise UserError(
            f"{apart}, and what selective activation checkpointing keeps can be used once: set "
            'memory.activation_checkpointing = "full" or "none", or layout.pp_schedule = "interleaved_1f1b"'
        )


def reshards_after_forward(layout: LayoutRecipe) -> bool:
    """Whether gathered blocks are freed between forward and backward.

    Raises UserError when that is asked for with a schedule that splits the backward: it looks for the parameters that
    were used in the forward, and where they have been freed meanwhile they get no gradient, without any error.
    """
    splits = layout.pp > 1 and SCHEDULES[layout.pp_schedule].splits_backward
    if layout.reshard_after_forward is True and splits:
        raise UserError(
            f"layout.reshard_after_forward = true with layout.pp_schedule = {layout.pp_schedule!r} would leave weights "
            'without gradients: set it to "auto" or false, or layout.pp_schedule = "interleaved_1f1b"'
        )
    return not splits if layout.reshard_after_forward == "auto" else layout.reshard_after_forward
