"""Any recipe made so small that all its layouts can be tried in a minute: no weights, tokenizers or data are needed."""

from pathlib import Path

from headway.check.small_data import RECORDS, small_data
from headway.check.small_models import small_model
from headway.check.small_processor import write_processor
from headway.recipe import Recipe, parse_recipe


def shrunk(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe`` with a model of its kind in four narrow blocks and synthetic data, both written into ``folder``.

    Objective, optimizer and schedule stay, and so do trained and frozen parts, adapters, and the kinds of attention,
    norms, experts and ties that the recipe or, where it is there, its model folder tells. A VAE becomes folded pixels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = recipe.model_dump(mode="json")
    document["model"] = small_model(recipe.model, folder / "text_encoders")
    document["data"] = small_data(recipe.data, folder / "data", text=recipe.objective.kind == "next_token")
    if recipe.objective.kind == "vision_language":
        config = document["model"]["config"]
        config |= write_processor(folder / "processor", config["vision_config"])
        document["model"] |= {"processor": str(folder / "processor"), "tokenizer": None}
    document["run"] |= {"global_batch": RECORDS, "micro_batch": RECORDS}
    document["sample"]["prompts"] = []
    return parse_recipe(document, source="the shrunk recipe")
