"""Lists of layouts: what the user writes, and the automatic one."""

import pytest

from headway.check import auto_layouts, make_layout, parse_layouts
from headway.errors import UserError
from headway.recipe import LayoutRecipe, MemoryRecipe


def test_a_list_names_layouts_and_their_ranks() -> None:
    first, second, third = parse_layouts("tp=2,dp_shard=2; pp=2,pp_schedule=zbv;cp=4,cp_kind=both,cp_ulysses=2;")
    assert (first.ranks, second.ranks, third.ranks) == (4, 2, 4)
    assert first.overrides == {"layout": {"tp": 2, "dp_shard": 2}}
    assert second.overrides == {"layout": {"pp": 2, "pp_schedule": "zbv"}}
    assert third.data_ranks == 1


def test_a_name_reads_back_to_the_same_layout() -> None:
    text = "pp=2,pp_cuts=[1,3],dp_replicate=2,activation_checkpointing=full,reshard_after_forward=false,micro_batch=1"
    (layout,) = parse_layouts(text)
    assert layout.name == text
    assert layout.overrides == {
        "layout": {"pp": 2, "pp_cuts": [1, 3], "dp_replicate": 2, "reshard_after_forward": False},
        "memory": {"activation_checkpointing": "full"},
        "run": {"micro_batch": 1},
    }
    for layout in auto_layouts(language=True, experts=True):
        assert parse_layouts(layout.name) == [layout]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no layout"),
        ("dp_shards=2", "did you mean dp_shard?"),
        ("tp", "not KEY=VALUE"),
        ("tp=2;cp=0", "not a number of ranks"),
        ("dp_shard=auto", "not a number of ranks"),
    ],
)
def test_a_wrong_list_is_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_layouts(text)


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_the_automatic_list_has_one_of_each_kind(language: bool, experts: bool) -> None:
    layouts = auto_layouts(language=language, experts=experts)
    recipes = [LayoutRecipe(**{"dp_shard": 1} | layout.overrides.get("layout", {})) for layout in layouts]
    for layout in layouts:
        MemoryRecipe(**layout.overrides.get("memory", {}))
    assert len({layout.name for layout in layouts}) == len(layouts)
    schedules = {recipe.pp_schedule for recipe in recipes if recipe.pp > 1}
    assert schedules == set(LayoutRecipe.model_fields["pp_schedule"].annotation.__args__)
    assert {recipe.cp_kind for recipe in recipes if recipe.cp > 1} == {"ulysses", "ring", "both"}
    assert any(recipe.ep > 1 for recipe in recipes) == experts
    assert any(recipe.tp > 1 and not recipe.sequence_parallel for recipe in recipes) == language
    axes = [sum(getattr(recipe, axis) > 1 for axis in ("pp", "dp_shard", "cp", "tp")) for recipe in recipes]
    ranks = [layout.ranks for layout in layouts]
    assert max(ranks) == 8
    assert all(number <= 4 or met == 3 for number, met in zip(ranks, axes, strict=True))
    pairs = [{"tp", "dp_shard"}, {"cp", "dp_shard"}, {"pp", "dp_shard"}, {"cp", "tp"}, {"pp", "tp"}, {"pp", "cp"}]
    met = [{axis for axis in ("pp", "dp_shard", "cp", "tp") if getattr(recipe, axis) > 1} for recipe in recipes]
    assert all(pair in met for pair in pairs)


def test_every_rank_gets_two_micro_batches_and_a_pipeline_four() -> None:
    assert make_layout(dp_shard=2).micro_batches == 2
    assert make_layout(pp=2, dp_shard=2).micro_batches == 4
