"""``headway export``: a run's weights as a folder that diffusers or transformers load alone."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.cli.result import JsonPath, give_result
from headway.errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    to: Annotated[Path, typer.Option(help="Folder to write; it must not exist.", show_default=False)],
    ema: Annotated[float | None, typer.Option(help="Export the averages of this decay.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the trained weights; as trained if left out.")] = None,
    lora: Annotated[Literal["merged", "adapters"], typer.Option(help="Adapters in the weights, or alone.")] = "merged",
    json_: JsonPath = None,
) -> None:
    """Export the newest good checkpoint of a run.

    Example: headway export runs/demo --to exported --ema 0.99
    """
    line = export_run(run, to, ema, dtype, lora)
    give_result({"folder": str(to), "load": line}, f"exported to {to}; load it with\n  {line}", json_)


def export_run(
    run: Path,
    to: Path,
    ema: float | None = None,
    dtype: str | None = None,
    lora: Literal["merged", "adapters"] = "merged",
) -> str:
    """Write the folder and return the line of Python that loads it. Raises UserError."""
    import torch

    from headway.export import check_destination, export_weights
    from headway.recipe import load_recipe
    from headway.train import newest_good, read_full, read_tokenizers

    check_destination(to)
    recipe = load_recipe(_recipe_file(run))
    checkpoint = newest_good(run / "checkpoints", lambda path, problems: _tell_damaged(path, problems))
    if checkpoint is None:
        raise UserError(f"{run}/checkpoints holds no good checkpoint to export")
    if ema is not None and ema not in recipe.ema.decays:
        kept = ", ".join(map(str, recipe.ema.decays)) or "none"
        raise UserError(f"--ema {ema}: the run keeps averages with decays {kept}")
    state = read_full(checkpoint, "model" if ema is None else f"ema.{ema}")
    return export_weights(
        recipe,
        state,
        to,
        tokenizers=read_tokenizers(recipe.model, run),
        dtype=getattr(torch, dtype) if dtype else None,
        lora=lora,
    )


def _recipe_file(run: Path) -> Path:
    file = run / "recipe.toml"
    if not os.path.isfile(file):
        raise UserError(f"{run}: not a run directory that this user may read (no recipe.toml is found in it)")
    return file


def _tell_damaged(path: Path, problems: list[str]) -> None:
    typer.echo(f"headway: warning: {path.name} is damaged and passed over: {'; '.join(problems)}", err=True)
