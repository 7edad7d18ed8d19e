"""Laws 1, 2 and 4 across the axes: tensor, context, pipeline and expert parallelism, alone and multiplied."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.errors import UserError
from headway.parallel import Ranks
from headway.recipe import CheckpointRecipe, LayoutRecipe, Recipe, sizes
from headway.train import Trainer, assemble, training_loader
from headway.train.checkpoints import Checkpoints
from ranks import run_ranks
from soak import soak
from test_layout_invariance import relative, whole
from tiny_recipes import image_folder, image_recipe, text_file, text_recipe

STEPS = 3
EXPERTS = {
    "class_name": "Qwen3MoeForCausalLM",
    "tokenizer": "bytes",
    "config": {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.1,
    },
}


def trainer_of(recipe: Recipe) -> Trainer:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return Trainer(recipe, assemble(recipe, ranks, recipe.run.directory), lambda: False, lambda kind, **fields: None)


def steps_of(trainer: Trainer, steps: range) -> list[Any]:
    loader = training_loader(trainer.recipe, trainer.parts, steps, start_position=trainer.progress.position)
    return [trainer.step(batches) for batches in loader]


def found_by(trainer: Trainer, results: list[Any]) -> dict[str, Any]:
    state = trainer.state()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "samples": [result.samples for result in results],
        "tokens": [result.tokens for result in results],
        "routing": [result.routing for result in results],
        "model": whole(state["model"]),
        "ema": whole(state["ema"]["0.9"]),
    }


def train(recipe: Recipe) -> dict[str, Any]:
    """All steps of ``recipe``; weights and averages of this rank's stages, whole."""
    trainer = trainer_of(recipe)
    return found_by(trainer, steps_of(trainer, range(recipe.run.steps)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    image_folder(folder / "pictures")
    text_file(folder / "text.jsonl")
    return folder


def recipe_of(kind: str, files: Path, directory: Path, **sections: dict[str, Any]) -> Recipe:
    sections["run"] = {"steps": STEPS, "micro_batch": 4} | sections.get("run", {})
    if kind == "image":
        return image_recipe(files / "pictures", directory, **sections)
    if kind == "experts":
        sections["model"] = EXPERTS
    return text_recipe(files / "text.jsonl", directory, **sections)


@pytest.fixture(scope="module")
def references(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {
        kind: run_ranks(1, train, recipe_of(kind, data, tmp_path_factory.mktemp("run")))[0]
        for kind in ("text", "experts", "image")
    }


def assert_same(outcomes: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every rank tells the same losses and norms, and the ranks' stages together are the model."""
    for found in outcomes:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert (found["samples"], found["tokens"]) == (expected["samples"], expected["tokens"])
    for part in ("model", "ema"):
        together = {name: tensor for found in outcomes for name, tensor in found[part].items()}
        assert together.keys() == expected[part].keys()
        assert relative([together[name] for name in expected[part]], expected[part].values()) < 1e-4


OFFLOADED = {"activation_checkpointing": "full", "offload_activations": True}
LAYOUTS: list[Any] = [
    soak("text", 4, {"tp": 2}, {}),
    ("text", 2, {"tp": 2, "sequence_parallel": False}, {"memory": {"activation_checkpointing": "selective"}}),
    ("text", 4, {"tp": 2, "pp": 2}, {}),
    ("text", 4, {"tp": 2, "cp": 2}, {"memory": OFFLOADED, "data": {"sequence_length": 33}}),
    ("text", 4, {"pp": 2, "cp": 2, "cp_kind": "ring"}, {"memory": {"activation_checkpointing": "full"}}),
    soak("text", 4, {"pp": 2, "dp_replicate": 2}, {}),
    ("text", 4, {"cp": 4, "cp_kind": "both", "cp_ulysses": 2}, {"optim": {"kind": "muon"}}),
    soak("text", 4, {"tp": 2}, {"optim": {"kind": "muon"}}),
    ("experts", 2, {"ep": 2}, {"objective": {"router_exact": True, "router_z": 0.01}}),
    ("experts", 4, {"ep": 2, "tp": 2}, {}),
    ("experts", 4, {"ep": 2, "pp": 2}, {}),
    ("experts", 4, {"ep": 4, "cp": 2}, {}),
    soak("image", 2, {"tp": 2}, {"memory": {"activation_checkpointing": "full"}}),
    soak("image", 4, {"tp": 2, "cp": 2, "cp_kind": "ring"}, {}),
    ("image", 2, {"tp": 2}, {"layout": {"prefetch": 2}}),
    soak("image", 4, {"cp": 2}, {"layout": {"prefetch": 2}}),
]


@pytest.mark.parametrize(("kind", "world", "layout", "sections"), LAYOUTS, ids=str)
def test_every_product_of_axes_computes_what_one_device_does(
    kind: str,
    world: int,
    layout: dict[str, Any],
    sections: dict[str, dict[str, Any]],
    references: dict[str, dict[str, Any]],
    data: Path,
    tmp_path: Path,
) -> None:
    expected = references[kind]
    changed = {name: section for name, section in sections.items() if name in ("optim", "objective", "data")}
    if changed:
        expected = run_ranks(1, train, recipe_of(kind, data, tmp_path / "reference", **changed))[0]
    sections = sections | {"layout": layout | sections.get("layout", {})}
    data_ranks = sizes(LayoutRecipe(**layout), world).data  # two micro-batches each
    recipe = recipe_of(kind, data, tmp_path / "run", run={"micro_batch": 4 // data_ranks}, **sections)
    outcomes = run_ranks(world, train, recipe)
    assert_same(outcomes, expected)
    if kind == "experts":
        for found in outcomes:
            for report, wanted in zip(found["routing"], expected["routing"], strict=True):
                for name, value in wanted.items():
                    assert report[name] == pytest.approx(value, rel=1e-4), name


def train_and_save(recipe: Recipe, steps: range) -> dict[str, Any]:
    """Go on from the newest checkpoint if there is one, take ``steps``, and save another."""
    trainer = trainer_of(recipe)
    checkpoints = Checkpoints(recipe.run.directory / "checkpoints", CheckpointRecipe(), lambda kind, fields: None)
    newest = checkpoints.newest_good()
    if newest is not None:
        trainer.restore(lambda state: checkpoints.load(newest, state))
    results = steps_of(trainer, steps)
    checkpoints.save(steps.stop, trainer.state(), final=True)
    checkpoints.finish()
    return found_by(trainer, results)


def test_a_run_goes_on_in_any_other_layout(references: dict[str, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    """Model, optimizer, averages, routers and data, from one step to the next: three layouts and one device."""
    directory = tmp_path / "run"
    outcomes: list[dict[str, Any]] = []
    for step, (world, layout) in enumerate([(4, {"tp": 2, "ep": 2}), (2, {"pp": 2}), (4, {"cp": 2, "ep": 4})]):
        recipe = recipe_of("experts", data, directory, layout=layout, run={"micro_batch": 2})
        outcomes = run_ranks(world, train_and_save, recipe, range(step, step + 1))
        for found in outcomes:
            assert found["losses"] == pytest.approx(references["experts"]["losses"][step : step + 1], rel=1e-5)
            assert found["norms"] == pytest.approx(references["experts"]["norms"][step : step + 1], rel=1e-4)
    alone = run_ranks(1, train_and_save, recipe_of("experts", data, directory), range(STEPS, STEPS))
    for outcome in (outcomes, alone):
        for part in ("model", "ema"):
            together = {name: tensor for found in outcome for name, tensor in found[part].items()}
            expected = references["experts"][part]
            assert relative([together[name] for name in expected], expected.values()) < 1e-4


def refusal(recipe: Recipe) -> str:
    with pytest.raises(UserError) as caught:
        trainer_of(recipe)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "world", "layout", "message"),
    [
        ("text", 2, {"ep": 2}, "layout.ep = 2 needs a mixture of experts"),
        ("text", 3, {"tp": 3}, "layout.tp = 3"),
        ("text", 3, {"pp": 3}, "2 blocks of Qwen3ForCausalLM make 2 at most"),
        ("image", 4, {"cp": 4}, "layout.cp"),
        ("image", 2, {"pp": 2}, "freeze the text encoders"),
        ("experts", 3, {"ep": 3}, "layout.ep = 3 must divide"),
        (
            "text",
            2,
            {"tp": 2},
            "data.sequence_length = 33 is not a multiple of layout.tp = 2: set it to 32",
        ),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused_before_anything_starts(
    kind: str, world: int, layout: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    length = {"sequence_length": 33} if "sequence_length" in message else {}
    run = {"global_batch": 6, "micro_batch": 1}
    for said in run_ranks(world, refusal, recipe_of(kind, data, tmp_path, run=run, layout=layout, data=length)):
        assert message in said


def test_selective_checkpointing_under_a_split_backward_is_refused(data: Path, tmp_path: Path) -> None:
    layout = {"pp": 2, "pp_schedule": "zbv"}
    memory = {"activation_checkpointing": "selective"}
    (said, _) = run_ranks(2, refusal, recipe_of("text", data, tmp_path, layout=layout, memory=memory))
    assert "activation_checkpointing" in said
