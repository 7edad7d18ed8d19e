"""``headway recipe show``: the recipe that a run would use, every default written out."""

from pathlib import Path
from typing import Annotated

import typer

recipe_app = typer.Typer(name="recipe", help="Look at recipes.", no_args_is_help=True)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (.toml).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe, e.g. --set optim.lr=3e-4. Repeatable."),
]


@recipe_app.callback()
def _recipe() -> None:
    pass


@recipe_app.command("show")
def show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print the resolved recipe as TOML.

    Example: headway recipe show examples/demo.toml --set run.steps=10
    """
    from headway.recipe import load_recipe, to_toml

    print(to_toml(load_recipe(recipe, overrides or ())), end="")
