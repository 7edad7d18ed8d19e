"""A search from recipe to plans: analytic beside rehearsed, memory, cost, explanation, page and contract."""

import json
from dataclasses import replace
from math import erfc
from types import SimpleNamespace

import numpy as np
import pytest

from headway.cluster import cluster_named
from headway.plan.analytic import out_of_memory
from headway.plan.choice import Choice
from headway.plan.explanation import explanation
from headway.plan.plan_page import frontier, write_plan_page
from headway.plan.search import json_of, plan
from headway.plan.whole_step import rounds, whole_step
from headway.recipe import Recipe
from headway.rehearse import Ranged, Shares, predict, rehearse, roles
from rehearsed_recipes import layers

DGX = cluster_named("dgx-h100")
pytestmark = pytest.mark.soak
"""Many rehearsals: minutes."""


def wide(**sections) -> Recipe:
    """Eight blocks of a size at which kernels, not the host, decide."""
    recipe = layers(8, run={"global_batch": 16, "compile": False}, data={"sequence_length": 4096}, **sections)
    config = recipe.model.config | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 32000,
    }  # fmt: skip
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


@pytest.fixture(scope="module")
def planned():
    return plan(wide(), DGX, [8], top=2, price=2.0, precisions=["bfloat16"])


@pytest.fixture(scope="module")
def analysed(planned):
    return planned.analysed


def test_times_and_memory_from_blocks_are_near_those_of_whole_rehearsals(analysed):
    """What the analytic pass is for is to choose what to rehearse: a fifth is near enough."""
    found = analysed
    wanted = [
        {"dp_shard": 8, "tp": 1, "pp": 1, "micro_batch": 2, "reshard": 1, "checkpointing": 0},
        {
            "dp_shard": 4,
            "tp": 2,
            "pp": 1,
            "cp_ring": 1,
            "cp_ulysses": 1,
            "micro_batch": 4,
            "reshard": 1,
            "checkpointing": 2,
        },
    ]
    for values in wanted:
        here = np.ones(len(found.candidates), dtype=bool)
        for name, value in values.items():
            here &= found.candidates[name] == value
        place = int(np.flatnonzero(here)[0])
        choice = found.candidates.choice(place)
        whole = whole_step(wide(), choice, DGX)
        assert found.analysis.step_ns.value[place] / 1e9 == pytest.approx(whole.step_time_s.value, rel=0.2), choice
        assert found.analysis.memory.value[place] == pytest.approx(whole.memory.peak.value, rel=0.2), choice


@pytest.mark.parametrize(("shards", "stages"), [(2, 1), (1, 2)])
def test_few_accumulated_micro_batches_tell_of_many(shards, stages):
    recipe = layers(2, run={"global_batch": 12})
    choice = Choice(2, 1, shards, 1, 1, 1, stages, "1f1b", 1, 1, 1, "none", "bfloat16", True)
    found = whole_step(recipe, choice, DGX)
    assert rounds(choice)[1] < 6
    chosen = choice.applied_to(recipe)
    whole = predict((rehearse(chosen, 2, role.rank) for role in roles(chosen, 2)), DGX)
    assert found.step_time_s.value == pytest.approx(whole.step_time_s.value, rel=0.02)
    assert found.memory.peak.value == pytest.approx(whole.memory.peak.value, rel=0.02)
    expected = whole.as_json()
    assert found.as_json().keys() == expected.keys()
    for name in ("tokens_per_s_per_device", "samples_per_s_per_device", "tflops_per_device", "mfu", "hfu"):
        assert found.rates[name] == pytest.approx(expected[name], rel=0.02)
    assert found.shares.total == pytest.approx(found.step_time_s.value, rel=0.01)


def test_more_memory_never_makes_the_best_slower(analysed):
    found = analysed
    best = []
    for gb in (8, 16, 24, 40, 80, 160):
        accelerator = DGX.accelerator.model_copy(update={"memory_gb": float(gb)})
        oom = out_of_memory(found.analysis.needed, DGX.model_copy(update={"accelerator": accelerator}), erfc)
        order = replace(found, oom=oom).ranked()
        best.append(found.analysis.step_ns.value[order[0]] if len(order) else np.inf)
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1]


def test_ranges_hold_the_value_and_parts_add_up(analysed):
    time, memory = analysed.analysis.step_ns, analysed.analysis.memory
    for one in (time, memory, analysed.analysis.needed):
        assert (one.low <= one.value).all()
        assert (one.value <= one.high).all()
        assert (one.value > 0).all()
    assert np.allclose(analysed.analysis.parts.total(), time.value)


def test_recomputation_costs_time_and_saves_memory(analysed):
    """The same layout under each checkpointing, everywhere in the space."""
    columns = analysed.candidates.columns
    others = np.stack([column for name, column in columns.items() if name != "checkpointing"])
    _, group = np.unique(others, axis=1, return_inverse=True)
    time, memory = analysed.analysis.step_ns.value, analysed.analysis.memory.value
    none = {g: place for place, g in enumerate(group.ravel()) if columns["checkpointing"][place] == 0}
    full = {g: place for place, g in enumerate(group.ravel()) if columns["checkpointing"][place] == 2}
    both = sorted(set(none) & set(full))
    assert len(both) > 100
    first, second = [none[g] for g in both], [full[g] for g in both]
    assert (time[first] < time[second]).all()
    assert (memory[first] >= memory[second] * 0.98).mean() > 0.95


def test_the_frontier_is_beaten_by_none(analysed):
    places = frontier(analysed)
    time, memory = analysed.analysis.step_ns.value, analysed.analysis.memory.value
    for place in places:
        assert not ((time < time[place]) & (memory < memory[place])).any()
    assert time[places[0]] == time.min()
    assert memory[places[-1]] == memory.min()


def test_the_result_is_the_contract(planned):
    result = json.loads(json.dumps(json_of(planned), allow_nan=False))
    assert {"cluster", "evaluated", "seconds", "plans", "rejected"} <= set(result)
    assert len(result["plans"]) == 2
    for row in result["plans"]:
        assert {"layout", "micro_batch", "activation_checkpointing", "precision", "prediction", "overrides"} <= set(row)
        found = row["prediction"]
        for name in ("step_time_s", "peak_memory_gib"):
            assert 0 < found[name]["low"] < found[name]["value"] < found[name]["high"]
        for name in ("tokens_per_s_per_device", "samples_per_s_per_device", "tflops_per_device", "mfu"):
            assert found[name] > 0
        assert 0 <= found["oom_probability"] <= 0.5
        step = found["step_time_s"]["value"]
        assert row["cost_of_step"]["value"] == pytest.approx(step * 8 * 2.0 / 3600)
        assert sum(row["analytic"]["breakdown"].values()) == pytest.approx(row["analytic"]["step_time_s"]["value"])
    times = [row["prediction"]["step_time_s"]["value"] for row in result["plans"]]
    assert times == sorted(times)
    assert all({"layout", "reason", "count"} == set(row) for row in result["rejected"])


def _made(planned, place: int, seconds: float, shares: Shares):
    """A plan of the search with another prediction."""
    time = Ranged(seconds, seconds * 0.99, seconds * 1.01)
    memory = SimpleNamespace(peak=Ranged(2e10, 1.9e10, 2.1e10))
    return replace(planned.plans[place], prediction=SimpleNamespace(step_time_s=time, shares=shares, memory=memory))


def test_the_explanation_names_what_the_difference_is_made_of(planned):
    quick = Shares(0.8, 0.0, 0.05, {"tp": 0.05}, 0.0, 0.1, 0.0)
    slow = Shares(0.8, 0.0, 0.05, {"tp": 0.35}, 0.0, 0.0, 0.0)
    told = explanation(
        replace(planned, price=None, plans=(_made(planned, 0, 1.0, quick), _made(planned, 1, 1.2, slow)))
    )
    assert "20.0% faster" in told
    assert "saves 0.3 s (25% of the step) in tensor parallelism's exposed communication" in told
    assert "pays 0.1 s (8% of the step) in waiting for other pipeline stages" in told
    assert "overlap" not in told
    assert "\n" not in told


def test_an_explanation_of_equals_does_not_invent_a_cause(planned):
    same = Shares(0.8, 0.0, 0.2, {}, 0.0, 0.0, 0.0)
    told = explanation(replace(planned, plans=(_made(planned, 0, 1.0, same), _made(planned, 1, 1.001, same))))
    assert "No single part" in told
    assert "Their ranges overlap" in told


def test_the_page_holds_every_candidate_and_needs_no_network(planned, tmp_path):
    file = tmp_path / "plan.html"
    write_plan_page(planned, "a model & its plans </script>", file)
    text = file.read_text()
    assert '"DATA"' not in text
    assert text.count("</script>") == 1
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert planned.plans[0].choice.name in text
    assert text.count("recompute") >= min(len(planned.analysed.candidates), 1000)
