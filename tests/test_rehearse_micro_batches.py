"""A step put together from few micro-batches is the step of all: every operator, byte, dependency and allocation."""

import pytest

import rehearsed_recipes as recipes
from headway.rehearse.contexts import contexts, fewest
from headway.rehearse.dress_rehearsal import rehearse_whole
from headway.rehearse.passing import fewer_micro_batches
from headway.rehearse.stage_blocks import with_cuts
from headway.rehearse.tokens import renumbered
from soak import soak

FULL = {"activation_checkpointing": "full"}


def pipeline(schedule, ranks, stages, micro_batches, data=1, **sections):
    layout = {"pp": ranks, "pp_schedule": schedule, "pp_stages_per_rank": stages} | sections.pop("layout", {})
    run = {"global_batch": data * micro_batches}
    return recipes.layers(ranks * stages, layout=layout, run=run, **sections)


CASES = {
    "one device": (recipes.layers(2, run={"global_batch": 8}), 1, 0),
    "shards": (recipes.layers(2, run={"global_batch": 16}, memory=FULL), 2, 1),
    "replicas": (recipes.layers(2, run={"global_batch": 32}, layout={"dp_replicate": 2}), 4, 1),
    "gpipe, first": (pipeline("gpipe", 2, 1, 6), 2, 0),
    "gpipe, last": (pipeline("gpipe", 2, 1, 6), 2, 1),
    "1f1b, first": (pipeline("1f1b", 4, 1, 9, layout={"tp": 2}), 8, 0),
    "1f1b, middle": (pipeline("1f1b", 4, 1, 9, 2, memory=FULL), 8, 2),
    "1f1b, last": (pipeline("1f1b", 2, 1, 7), 2, 1),
    "interleaved, first": (pipeline("interleaved_1f1b", 2, 2, 12, 2), 4, 0),
    "interleaved, last": (pipeline("interleaved_1f1b", 2, 2, 12, 2), 4, 2),
    "zero bubble, first": (pipeline("interleaved_zero_bubble", 2, 2, 16), 2, 0),
    "zero bubble, last": (pipeline("interleaved_zero_bubble", 2, 2, 16), 2, 1),
    "zbv, first": (pipeline("zbv", 2, 2, 10, 2), 4, 0),
    "zbv, last": (pipeline("zbv", 2, 2, 10, 2), 4, 2),
}
IN_SUITE = ("1f1b, last", "shards")


@pytest.mark.parametrize("name", [name if name in IN_SUITE else soak(name) for name in CASES])
def test_few_micro_batches_tell_of_all(name):
    recipe, devices, rank = CASES[name]
    recipe = with_cuts(recipe)
    whole = renumbered(rehearse_whole(recipe, devices, rank))
    passing = fewer_micro_batches(recipe, devices, rank)
    few = passing.rehearsed(recipe, devices, rank)
    assert len(few.operators) < len(whole.operators)
    found = renumbered(passing.completed(few))
    for number, (one, other) in enumerate(zip(found.operators, whole.operators, strict=False)):
        assert one == other, number
    assert found == whole


def test_a_short_order_has_every_context_twice_and_each_micro_batch_whole():
    warm = 16
    kinds = ["forward"] * warm + ["backward", "forward"] * 48 + ["backward"] * warm + ["reduce"]
    counts = {kind: 0 for kind in kinds}
    order = []
    for kind in kinds:
        order.append((kind, 3, counts[kind] if kind != "reduce" else -1))
        counts[kind] += 1
    short = fewest(order, 1)
    own = contexts([kind for kind, _, _ in short], 1)
    every = contexts(kinds, 1)
    assert all(own.count(context) >= min(2, every.count(context)) for context in set(every))
    forwards = [number for kind, _, number in short if kind == "forward"]
    assert forwards == [number for kind, _, number in short if kind == "backward"] == list(range(len(forwards)))
    assert len(forwards) <= 6


def test_few_micro_batches_are_all_rehearsed():
    assert fewer_micro_batches(recipes.layers(2, run={"global_batch": 6}), 2, 0) is None
