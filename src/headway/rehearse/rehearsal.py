"""The record of a rank's step, from few of its blocks where they repeat, and the roles that ranks have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.recipe import Recipe, accumulation, sizes
from headway.rehearse.dress_rehearsal import rehearse_whole
from headway.rehearse.extension import Longer, Series, extended
from headway.rehearse.passing import AllMicroBatches, Passing, fewer_micro_batches
from headway.rehearse.record import Facts, Record
from headway.rehearse.runs import NotPeriodic, Runs
from headway.rehearse.shortening import Shortened, shortened
from headway.rehearse.stage_blocks import stages_of, with_cuts
from headway.rehearse.step_sizes import StepSizes, step_sizes
from headway.rehearse.tokens import renumbered


@dataclass(frozen=True)
class Role:
    """Ranks that do the same: those of one place in the pipeline."""

    rank: int
    """The first of them, which has the largest shards where they are uneven."""
    place: int
    """In the pipeline."""
    stages: tuple[int, ...]
    """Of the whole pipeline, on these ranks."""
    ranks: range
    """All of them."""


def roles(recipe: Recipe, devices: int) -> list[Role]:
    """The roles of ``devices`` ranks, in the order of the pipeline. Raises UserError for a layout that can't be."""
    axes = sizes(recipe.layout, devices)
    accumulation(recipe.run.global_batch, recipe.run.micro_batch, axes.data)
    firsts = range(0, devices, axes.stage)
    return [
        Role(rank, place, tuple(stages_of(recipe, devices, rank)), range(rank, rank + axes.stage))
        for place, rank in enumerate(firsts)
    ]


def rehearse(recipe: Recipe, devices: int, rank: int = 0) -> Record:
    """The record of the step of ``rank`` of ``devices``: equal to ``rehearse_whole``'s, storages renumbered.

    Where blocks or micro-batches repeat, a few are rehearsed and the record is extended to all of them. What is
    extended by one block is held to a rehearsal with one block more, and segments of micro-batches to each other; where
    they differ all are rehearsed. Raises UserError.
    """
    cut = with_cuts(recipe)
    short = shortened(cut, devices, rank)
    for passing in (fewer_micro_batches(cut, devices, rank), AllMicroBatches()):
        if passing is not None:
            try:
                found = _of_all_blocks(cut, short, devices, rank, passing)
                return renumbered(passing.completed(found))
            except NotPeriodic:
                pass
    return renumbered(rehearse_whole(cut, devices, rank))


def _of_all_blocks(recipe: Recipe, short: Shortened | None, devices: int, rank: int, passing: Passing) -> Record:
    if short is None:
        return passing.rehearsed(recipe, devices, rank)
    base = passing.rehearsed(short.base, devices, rank)
    series = short.series(base.facts)
    facts = _facts(base.facts, step_sizes(short.base), step_sizes(recipe), series)
    runs = Runs(base, [one.paths for one in series])
    longer = []
    for place, key in enumerate(short.extended):
        record = passing.rehearsed(short.longer[place], devices, rank)
        longer.append(Longer(short.own.index(key), Runs(record, short.paths(record.facts))))
    for one in longer:
        _check(runs, longer, _by_one(series, one), one.runs.record)
    return extended(runs, longer, series, facts)


def _by_one(series: Sequence[Series], longer: Longer) -> list[Series]:
    """One copy of the series of ``longer``, none of the others, named as it has them."""
    paths = longer.runs.paths
    return [replace(one, copies=int(number == longer.series), whole=paths[number]) for number, one in enumerate(series)]


def _check(base: Runs, longer: list[Longer], series: list[Series], rehearsed: Record) -> None:
    """Raises NotPeriodic unless extending by one block gives what rehearsing one block more does."""
    found = renumbered(extended(base, longer, series, rehearsed.facts))
    expected = renumbered(rehearsed)
    for name in ("operators", "allocations", "host_reads", "actions"):
        if getattr(found, name) != getattr(expected, name):
            raise NotPeriodic(f"{name} extended by one block are not those of a rehearsal with one block more")


def _facts(base: Facts, own: StepSizes, whole: StepSizes, series: Sequence[Series]) -> Facts:
    """``own``: of the base record, ``whole``: of all blocks."""
    passes = base.micro_batches * base.sizes["dp_replicate"] * base.sizes["dp_shard"]
    blocks: dict[str, str] = {}
    stages: dict[str, int] = {}
    places = {path: one for one in series for path in one.paths}
    for path, class_name in base.blocks.items():
        one = places.get(path)
        names = [path] if one is None else one.whole if path == one.paths[0] else []
        blocks |= dict.fromkeys(names, class_name)
        stages |= dict.fromkeys(names, base.block_stages[path])
    return replace(
        base,
        blocks=blocks,
        block_stages=stages,
        model_flops=base.model_flops + (whole.model_flops - own.model_flops) * passes,
        recomputed_flops=base.recomputed_flops + (whole.recomputed_flops - own.recomputed_flops) * passes,
        parameters=whole.parameters,
        trained_parameters=whole.trained_parameters,
    )
