"""A check bites: every fault of ``layout_faults`` is found, by what it does, and no layout is wrong without one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.check import LayoutResult, parse_layouts, shrunk
from headway.check.checking import Check
from headway.check.ranks import RanksFailed
from headway.check.verdict import failed
from headway.recipe import Recipe, load_recipe
from layout_faults import FAULTS, Fault
from soak import soak

pytestmark = pytest.mark.timeout(500)
EXAMPLES = Path(__file__).parent.parent / "examples"
DECODER = ["optim.kind=adamw", "model.config={tie_word_embeddings = true}"]
RECIPES = {
    "decoder": ("qwen3-8b", DECODER),
    "deep_decoder": ("qwen3-8b", DECODER),
    "documents": ("llama-3.1-8b", ["data.packing=false"]),
    "experts": ("qwen3-30b-a3b", []),
    "video": ("wan-14b-video", []),
}


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Check]:
    """The reference and one device for a recipe, made without any fault."""
    made: dict[str, Check] = {}

    def check(name: str) -> Check:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = Check(small(name, folder), "float32", folder, timeout_s=220)
        return made[name]

    return check


def small(name: str, folder: Path) -> Recipe:
    """Of two blocks, which take half the time of four; schedules of two stages on each rank need those."""
    example, overrides = RECIPES[name]
    recipe = shrunk(load_recipe(EXAMPLES / f"{example}.toml", overrides), folder / "shrunk")
    if name == "deep_decoder":
        return recipe
    config = dict(recipe.model.config)
    config["num_layers" if "num_layers" in config else "num_hidden_layers"] = 2
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


WITHOUT_FAULT = sorted({(fault.model, fault.layout) for fault in FAULTS})
DEAR = [
    ("decoder", "tp=4"),
    ("deep_decoder", "pp=2,pp_schedule=zbv,dp_shard=2,blocks_kept_gathered=0"),
    ("documents", "dp_shard=2"),
    ("experts", "dp_shard=2"),
    ("video", "dp_shard=2"),
]


@pytest.mark.parametrize(("model", "layout"), [soak(*own) if own in DEAR else own for own in WITHOUT_FAULT])
def test_a_layout_without_a_fault_passes(model: str, layout: str, checks: Callable[[str], Check]) -> None:
    result = judged(checks(model), layout)
    assert result.passed, result.reason
    assert result.first_difference is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.plant.__name__}-{fault.layout}")
def test_a_fault_is_found(fault: Fault, checks: Callable[[str], Check], monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks(fault.model)
    fault.plant(monkeypatch)
    result = judged(check, fault.layout)
    assert result.passed is False
    assert result.reason is not None
    assert fault.shows in result.reason


def judged(check: Check, name: str) -> LayoutResult:
    """The verdict on a layout, from its own ranks alone: they have gone on from the checkpoint of one device."""
    (layout,) = parse_layouts(name)
    try:
        return check.judged(check.run(layout, "layout"), elsewhere={})
    except RanksFailed as failure:
        return failed(layout, str(failure), seconds=0.0)
