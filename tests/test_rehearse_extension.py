"""A step extended from few blocks is the step of all of them: every operator, byte, dependency and allocation."""

import pytest

import rehearsed_recipes as recipes
from headway.rehearse import passing, rehearse
from headway.rehearse.dress_rehearsal import rehearse_whole
from headway.rehearse.tokens import renumbered
from soak import soak

CASES = {
    "one device": (recipes.layers(16), 1, 0),
    "shards, accumulation, checkpointing": (recipes.layers(16, memory={"activation_checkpointing": "full"}), 2, 1),
    "tensor parallel": (recipes.layers(16, layout={"tp": 2}, run={"global_batch": 2}), 4, 0),
    "last stage of a pipeline": (
        recipes.layers(32, layout={"pp": 2, "pp_cuts": [16, 16]}, run={"global_batch": 3}),
        2,
        1,
    ),
    "two kinds of blocks": (recipes.flux(23, 23, memory={"activation_checkpointing": "full"}), 2, 0),
}


@pytest.mark.parametrize("name", [name if name == "tensor parallel" else soak(name) for name in CASES])
def test_extended_is_whole(name, monkeypatch):
    recipe, devices, rank = CASES[name]
    whole = renumbered(rehearse_whole(recipe, devices, rank))
    depths = []

    def counted(recipe, devices, rank):
        record = rehearse_whole(recipe, devices, rank)
        depths.append(len(record.facts.blocks))
        return record

    monkeypatch.setattr(passing, "rehearse_whole", counted)
    found = rehearse(recipe, devices, rank)
    assert max(depths) < len(whole.facts.blocks)
    assert found.facts == whole.facts
    for number, (one, other) in enumerate(zip(found.operators, whole.operators, strict=False)):
        assert one == other, number
    assert len(found.operators) == len(whole.operators)
    assert found.host_reads == whole.host_reads
    assert found.actions == whole.actions
    assert found.allocations == whole.allocations
    assert found.groups == whole.groups


def test_few_blocks_and_blocks_that_differ_are_rehearsed_whole():
    few = rehearse(recipes.layers(3), 1)
    assert len(few.facts.blocks) == 3
    mixed = recipes.layers(8)
    config = mixed.model.config | {
        "layer_types": ["full_attention", "sliding_attention"] * 4, "use_sliding_window": True, "sliding_window": 8,
    }  # fmt: skip
    recipe = mixed.model_copy(update={"model": mixed.model.model_copy(update={"config": config})})
    assert len(rehearse(recipe, 1).facts.blocks) == 8
