"""What a rehearsal writes down is what a real run over gloo does: operators, collectives, bytes and memory."""

from dataclasses import replace

import pytest

import rehearsed_recipes as recipes
from headway.rehearse.dress_rehearsal import rehearse_whole
from ranks import run_ranks
from recorded_ranks import comparable, different, held, recorded
from soak import soak

LAYOUTS = {
    "one device, accumulation": (1, recipes.text()),
    "fully sharded, accumulation, averages": (2, recipes.text(precision={"compute": "bfloat16"})),
    "replicas of shards, packed documents": (4, recipes.text(layout={"dp_replicate": 2}, data={"packing": True})),
    "tensor parallel in shards, full checkpointing": (
        4,
        recipes.text(layout={"tp": 2}, memory={"activation_checkpointing": "full"}, run={"global_batch": 2}),
    ),
    "pipeline": (2, recipes.text(layout={"pp": 2}, run={"global_batch": 3})),
    "ring, selective checkpointing": (
        2,
        recipes.text(
            layout={"cp": 2, "cp_kind": "ring"},
            memory={"activation_checkpointing": "selective"},
            run={"global_batch": 1},
        ),
    ),
    "all-to-all over heads": (2, recipes.text(layout={"cp": 2}, run={"global_batch": 1})),
    "pictures": (2, recipes.images(run={"global_batch": 2})),
    "Muon": (2, recipes.text(run={"global_batch": 2}, optim={"kind": "muon"})),
}


DEAR = ("one device, accumulation", "replicas of shards, packed documents", "pictures", "Muon")


@pytest.mark.parametrize("name", [soak(name) if name in DEAR else name for name in LAYOUTS])
def test_a_rehearsal_is_equal_to_a_real_run(name):
    ranks, recipe = LAYOUTS[name]
    real = run_ranks(ranks, recorded, recipe)
    rank = ranks - 1
    rehearsed = rehearse_whole(recipe, ranks, rank)
    assert different(rehearsed, real[rank]) == []
    assert rehearsed.collectives() or ranks == 1
    assert held(rehearsed) == held(real[rank])
    assert rehearsed.peak_bytes() == pytest.approx(real[rank].peak_bytes(), rel=0.05)


def test_experts_exchange_in_the_order_of_a_real_run():
    recipe = recipes.mixture(layout={"ep": 2}, run={"global_batch": 2})
    real = run_ranks(2, recorded, recipe)

    def without_sizes(record):
        return [
            replace(
                o, flops=0, work=None, reads=(), writes=(), collective=o.collective and replace(o.collective, bytes=0)
            )
            for o in comparable(record)
        ]

    rehearsed = rehearse_whole(recipe, 2, 0)
    assert without_sizes(rehearsed) == without_sizes(real[0])
    assert [read.reason for read in rehearsed.host_reads] == [read.reason for read in real[0].host_reads]
    exchanges = [o for o in rehearsed.collectives() if o.collective.kind == "all_to_all"]
    assert len(exchanges) >= 2 * 5  # in each of two layers: counts, tokens and results, and two of them back
