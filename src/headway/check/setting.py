"""The recipe as a layout of it is checked: what it computes stays, what would hide or blow up differences goes."""

from pathlib import Path
from typing import Any, Literal

from headway.check.layouts import Layout
from headway.check.small_models import has_experts
from headway.recipe import Recipe, parse_recipe

STEPS = 3
SAVED_AFTER = 2
"""Steps after which a checkpoint is saved; the step after it is taken again by who loads it."""
EMA_DECAY = 0.5
Precision = Literal["float32", "bfloat16", "recipe"]
"""Of forward and backward passes; recipe: its own compute dtype and its own float8 products."""

# AdamW with an eps above every gradient is SGD with momentum: where a gradient is almost zero, the usual eps would
# blow its rounding up to a whole step. Gradients are always clipped, so that the norm that clips them counts, and with
# them the length of all parameters' update is about lr.
OPTIM: dict[str, Any] = {
    "lr": 0.3,
    "muon_lr": 0.02,
    "eps": 1e-3,
    "clip_norm": 1e-3,
    "schedule": "constant",
    "warmup_steps": 0,
    "decay_steps": 0,
}


# A thousandth of a loss, as models have it, would not be seen among the rounding of the rest.
ROUTERS = {"router_balance": 0.1, "router_z": 0.01}


def recipe_of_layout(recipe: Recipe, layout: Layout, precision: Precision, directory: Path) -> Recipe:
    """``recipe`` for ``STEPS`` steps on CPU in ``layout``, each rank with two micro-batches or more. Raises UserError.

    ``directory`` is where indexes of the data, tokenizers and checkpoints go, in all layouts the same.
    """
    document = recipe.model_dump(mode="json")
    document["layout"] = {"dp_shard": 1}
    document["memory"] = {}
    document["optim"] |= OPTIM
    if recipe.optim.kind == "muon":  # see Reference.gradients
        document["optim"]["clip_norm"] = None
    if recipe.optim.kind == "adamw_8bit":  # it quantises by shard: its numbers are another layout's up to 8 bits only
        document["optim"]["kind"] = "adamw"
    document["precision"] = {"master": "float32", "reduce": "float32"} | _passes(recipe, precision)
    document["data"] |= {"workers": 0, "max_bad_records": 10**9}
    document["ema"] = {"decays": [EMA_DECAY], "warmup": False}
    document["checkpoint"] = {"asynchronous": False}
    document["sample"] = {}
    document["metrics"] = {"writers": []}
    document["run"] |= {
        "steps": STEPS,
        "micro_batch": _micro_batch(recipe, layout),
        "directory": str(directory),
        "device": "cpu",
        "compile": False,
    }
    if recipe.objective.kind == "next_token" and has_experts(recipe.model):
        document["objective"] |= ROUTERS
    for section, values in layout.overrides.items():
        document[section] |= values
    return parse_recipe(document, source=f"layout {layout.name}")


def _passes(recipe: Recipe, precision: Precision) -> dict[str, Any]:
    """What decides the numbers of forward and backward passes."""
    if precision != "recipe":
        return {"compute": precision}
    return recipe.precision.model_dump(include={"compute", "matmul", "keep_high", "float8_all_gather"})


def recipe_of_reference(recipe: Recipe, directory: Path) -> Recipe:
    """``recipe`` for one device in float32, with micro-batches as large as the recipe's."""
    one = Layout("reference", {"run": {"micro_batch": recipe.run.micro_batch}})
    return recipe_of_layout(recipe, one, "float32", directory)


def without_router_losses(recipe: Recipe) -> Recipe:
    """For a model to which they are added by hand."""
    if recipe.objective.kind != "next_token":
        return recipe
    objective = recipe.objective.model_copy(update={"router_balance": 0.0, "router_z": 0.0, "router_exact": False})
    return recipe.model_copy(update={"objective": objective})


def with_library_code(recipe: Recipe) -> Recipe:
    """Without fused operators, which layouts may have."""
    return recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"fuse": False})})


def _micro_batch(recipe: Recipe, layout: Layout) -> int:
    """The largest that gives each rank its micro-batches, or 1 where the data ranks do not divide the batch."""
    share = recipe.run.global_batch // layout.data_ranks
    largest = min(recipe.run.micro_batch, share // layout.micro_batches)
    return next((size for size in range(largest, 0, -1) if share % size == 0), 1)
