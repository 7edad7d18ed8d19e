"""The search space of a plan: complete beside brute force, taken by training's own checks, written as overrides."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UserError
from headway.parallel.pipeline import SCHEDULES
from headway.plan.choice import Choice
from headway.plan.rules import Rules, schedules_of
from headway.plan.search_space import CHECKPOINTING, LARGEST_MICRO_BATCH, PRECISIONS, divisions, search_space
from headway.recipe import parse_recipe, sizes
from headway.recipe.load import load_recipe
from headway.recipe.show import to_toml
from headway.train import layout as training_layout
from rehearsed_recipes import flux, layers, mixture

RULES = {
    "text": Rules(layers(4, run={"global_batch": 8}, data={"sequence_length": 24})),
    "mixture": Rules(mixture(run={"global_batch": 8})),
    "flux": Rules(flux(2, 2, run={"global_batch": 8})),
}


def space(kind: str, devices: int):
    rules = RULES[kind]
    return rules, search_space(rules.recipe, [devices], rules)[0]


def choices(kind: str, devices: int) -> list[Choice]:
    _, found = space(kind, devices)
    return [found.choice(place) for place in range(len(found))]


def training_takes(rules: Rules, choice: Choice) -> bool:
    """Whether the Trainer would lay the model out so: its own checks, on the model on meta."""
    try:
        recipe = choice.applied_to(rules.recipe)
        axes = sizes(recipe.layout, choice.devices)
        data = axes.data * choice.micro_batch
        if recipe.run.global_batch % data:
            return False
        count = recipe.run.global_batch // data
        training_layout._check(recipe, rules.built, SimpleNamespace(sizes=axes), count, rules.costs)
    except UserError:
        return False
    return True


def brute_force(rules: Rules, devices: int) -> set[Choice]:
    """Everything that training takes, found by trying everything."""
    batch = rules.recipe.run.global_batch
    numbers = range(1, devices + 1)
    found = set()
    for replicate, shard, tp, ring, ulysses, pp in itertools.product(numbers, repeat=6):
        if replicate * shard * tp * ring * ulysses * pp != devices:
            continue
        for ep, (schedule, stages), micro, kept, precision, reshard in itertools.product(
            numbers, schedules_of(pp), (1, 2, 4, batch), CHECKPOINTING, PRECISIONS, (True, False)
        ):
            splits = pp > 1 and SCHEDULES[schedule].splits_backward
            if shard * ring * ulysses == 1 and reshard == splits:
                continue  # nothing is gathered: the two policies are one
            choice = Choice(
                devices, replicate, shard, tp, ring, ulysses, pp, schedule, stages, ep, micro, kept, precision, reshard
            )
            if (shard * ring * ulysses * tp) % ep == 0 and training_takes(rules, choice):
                found.add(choice)
    return found


@pytest.mark.parametrize(("kind", "devices"), [("text", 2), ("text", 3), ("mixture", 2), ("flux", 2)])
def test_the_enumeration_is_what_trying_everything_finds(kind, devices):
    found = choices(kind, devices)
    assert len(set(found)) == len(found)
    assert set(found) == brute_force(RULES[kind], devices)


@settings(max_examples=25, deadline=None)
@given(devices=st.sampled_from([1, 4, 6, 8, 12, 16]), kind=st.sampled_from(sorted(RULES)), data=st.data())
def test_every_candidate_is_one_that_training_takes(devices, kind, data):
    rules, found = space(kind, devices)
    choice = found.choice(data.draw(st.integers(0, len(found) - 1)))
    assert training_takes(rules, choice), choice
    assert choice.micro_batch <= LARGEST_MICRO_BATCH


@settings(max_examples=60, deadline=None)
@given(devices=st.integers(1, 64), has_experts=st.booleans())
def test_divisions_multiply_to_the_devices_and_repeat_none(devices, has_experts):
    found = list(divisions(devices, has_experts))
    assert len(set(found)) == len(found)
    for one in found:
        assert one.dp_replicate * one.dp_shard * one.tp * one.cp_ring * one.cp_ulysses * one.pp == devices
        assert one.dp_shard * one.cp_ring * one.cp_ulysses * one.tp % one.ep == 0


@settings(max_examples=25, deadline=None)
@given(devices=st.sampled_from([1, 4, 8, 16]), kind=st.sampled_from(sorted(RULES)), data=st.data())
def test_overrides_read_back_as_the_planned_layout(devices, kind, data, tmp_path_factory):
    rules, found = space(kind, devices)
    choice = found.choice(data.draw(st.integers(0, len(found) - 1)))
    file = tmp_path_factory.mktemp("plan") / "recipe.toml"
    file.write_text(to_toml(rules.recipe))
    read = load_recipe(file, choice.overrides(rules.recipe))
    assert read == choice.applied_to(rules.recipe)
    axes = sizes(read.layout, devices)
    assert axes == choice.sizes
    assert read.run.micro_batch == choice.micro_batch
    assert read.memory.activation_checkpointing == choice.checkpointing
    assert read.precision.compute == choice.precision
    file.write_text(to_toml(choice.applied_to(rules.recipe)))
    assert load_recipe(file) == read


def test_a_recipe_that_names_its_all_to_all_and_offloads_can_be_overridden():
    document = layers(4).model_dump(mode="python")
    document["layout"] |= {"cp": 4, "cp_kind": "both", "cp_ulysses": 2}
    document["memory"] |= {"activation_checkpointing": "full", "offload_activations": True}
    recipe = parse_recipe(document, "test")
    for ring, ulysses in ((1, 2), (2, 1), (1, 1), (2, 2)):
        choice = choices("text", 1)[0]._replace(
            devices=4, dp_shard=4 // (ring * ulysses), cp_ring=ring, cp_ulysses=ulysses
        )
        read = choice.applied_to(recipe)
        assert sizes(read.layout, 4) == choice.sizes
        assert read.memory.offload_activations == (choice.checkpointing == "full")


def test_what_is_refused_is_told_in_groups_with_an_example():
    rules = RULES["text"]
    _, rejections = search_space(rules.recipe, [12], rules)
    rows = rejections.as_json()
    assert rows == sorted(rows, key=lambda row: -row["count"])
    told = " ".join(row["reason"] for row in rows)
    assert "layout.tp = 3" in told
    assert "layout.pp_schedule" in told
    assert len(rows) < 20 < sum(row["count"] for row in rows)
