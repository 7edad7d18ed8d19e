"""What each axis of a layout sends in a step of two real ranks is what its closed formula says, message by message."""

from dataclasses import replace
from pathlib import Path

import pytest

from communication import recipes
from communication.cases import CASES, Case, expected
from communication.observation import observe
from ranks import run_ranks

ON_TWO_RANKS = [
    ("FSDP", "decoder", {"shard"}),
    ("FSDP, blocks kept", "decoder", {"shard"}),
    ("FSDP, no block kept", "decoder", {"shard"}),
    ("DDP", "decoder", {"dp_replicate"}),
    ("tensor parallel", "decoder", {"tp"}),
    ("tensor and sequence parallel", "decoder", {"tp"}),
    ("Ulysses", "decoder", {"cp_ulysses", "shard"}),
    ("ring", "decoder", {"cp_ring", "shard"}),
    ("pipeline, tied embedding", "decoder", {"pp"}),
    ("pipeline, ZBV", "decoder", {"pp"}),
    ("experts", "experts", {"ep", "shard"}),
]


def case_of(name: str, kind: str) -> Case:
    """On two ranks, with two layers where no pipeline wants more."""
    case = next(case for case in CASES if (case.name, case.kind, case.ranks) == (name, kind, 2))
    if "pp" in case.layout:
        return case
    config = (recipes.EXPERTS if kind == "experts" else recipes.DECODER) | {"num_hidden_layers": 2}
    return replace(case, sections=case.sections | {"model": {"config": config}})


@pytest.mark.parametrize(("name", "kind", "axes"), ON_TWO_RANKS, ids=[f"{n}, {k}" for n, k, _ in ON_TWO_RANKS])
def test_a_step_sends_what_the_formulas_say(name: str, kind: str, axes: set[str], tmp_path: Path) -> None:
    recipe = case_of(name, kind).recipe(tmp_path)
    everyone = run_ranks(2, observe, recipe)
    for own in everyone:
        assert set(own.traffic.by_axis) == axes | {"world"}
        assert own.traffic == expected(recipe, own, everyone)
