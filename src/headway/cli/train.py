"""``headway train``: from a recipe to a run directory, on one rank or many."""

import contextlib
import os
import shutil
import signal
import time
from typing import Annotated

import typer

from headway.cli.launcher import LAUNCHED, exit_code, launch
from headway.cli.prediction import PredictionBeside
from headway.cli.quiet import quieten_profiler
from headway.cli.recipe_show import Overrides, RecipeFile
from headway.cli.result import write_or_tell
from headway.cluster import cluster_of
from headway.errors import RunFailed, UserError
from headway.recipe import Recipe, accumulation, load_recipe, sizes
from headway.runs import RunConsole, RunDirectory, clear_request, compare, sample_name, summarise

OTHER_RANKS_WAIT_S = 15.0
"""Ranks mostly meet the same error: the first prints it and ends, and torchrun ends the others before they do."""


def train(
    recipe: RecipeFile,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on this machine; more than one starts torchrun.")] = 1,
    overrides: Overrides = None,
    export: Annotated[bool, typer.Option("--export", help="Export the trained weights at the end.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="What it runs on: its step is predicted, and compared with the run at the end."
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Profile a few steps of each rank, and explain them at the end."),
    ] = False,
    profile_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Steps that --profile takes, after the warm-up.")
    ] = 3,
) -> None:
    """Train a model. Start it again to go on from the newest good checkpoint of its run directory.

    Example: headway train examples/demo.toml --ranks 2 --set run.steps=100

    SIGTERM, SIGUSR1 and Ctrl-C end the run after the step at hand, with a checkpoint; it exits with 75 (130 after
    Ctrl-C), and the same command goes on from there. A second Ctrl-C ends it at once.

    Where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set it is one of several ranks, as in: torchrun
    --nproc-per-node 8 --no-python headway train RECIPE
    """
    resolved = load_recipe(recipe, overrides or ())
    profiled = profile_steps if profile else 0
    if profile:
        quieten_profiler()
    if cluster is not None:
        cluster_of(cluster)  # a mistake in it is told before anything starts
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"RANK is set, which makes this one of several ranks, but {', '.join(missing)} is not")
        if export or ranks > 1:
            raise UserError("--ranks and --export are for runs that headway starts itself, not for a rank of torchrun")
        if LAUNCHED not in os.environ and os.environ["RANK"] == "0":
            clear_request(resolved.run.directory)
        code = _as_one_rank(resolved, cluster, profiled)
        if LAUNCHED not in os.environ and os.environ["RANK"] == "0":
            _compare(resolved, RunConsole(resolved.run.steps))
        raise typer.Exit(code)
    data_ranks = sizes(resolved.layout, ranks).data
    accumulation(resolved.run.global_batch, resolved.run.micro_batch, data_ranks)
    RunDirectory(resolved.run.directory).create()
    clear_request(resolved.run.directory)
    if ranks == 1:
        code = _as_one_rank(resolved, cluster, profiled)
    else:
        sets = [part for override in overrides or () for part in ("--set", override)]
        on = [] if cluster is None else ["--cluster", cluster]
        on += ["--profile", "--profile-steps", str(profile_steps)] if profile else []
        code = launch(ranks, ["train", str(recipe), *sets, *on], resolved.run.directory)
    if code == 0:
        _finish(resolved, export)
        if profile:
            _explain(resolved)
    raise typer.Exit(code)


def _as_one_rank(recipe: Recipe, cluster: str | None, profile_steps: int) -> int:
    """Run this process's part; a stopped rank of torchrun ends with 0, as torchrun calls all else a failure.

    The first rank predicts the run on ``cluster``, while all of them import what they need and build the model.
    """
    try:
        with contextlib.ExitStack() as stack:
            before_first_step = None
            if cluster is not None and os.environ.get("RANK", "0") == "0":
                beside = PredictionBeside(recipe, cluster, int(os.environ.get("WORLD_SIZE", "1")))
                before_first_step = stack.enter_context(beside).before_first_step
            from headway.parallel import start_ranks
            from headway.train import run_recipe

            ranks = stack.enter_context(start_ranks(recipe.run.device, recipe.run.timeout_s))
            outcome = run_recipe(recipe, ranks, before_first_step, profile_steps)
    except (UserError, RunFailed):
        if os.environ.get("RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(OTHER_RANKS_WAIT_S)
        raise
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else exit_code(outcome.stopped_by)


def _finish(recipe: Recipe, export: bool) -> None:
    """Export if asked, then show what the run came to."""
    directory = recipe.run.directory
    paths = {"run": str(directory)}
    samples = RunDirectory(directory).newest_samples()
    if samples is not None:
        paths["samples"] = str(samples)
    if export:
        from headway.cli.export import export_run

        folder = directory / "export"
        shutil.rmtree(folder, ignore_errors=True)
        decay = max(recipe.ema.decays, default=None)
        line = export_run(directory, folder, decay)
        weights = "live weights" if decay is None else f"averages of decay {decay}"
        paths["exported"] = f"{folder} ({weights})"
        paths["load it with"] = line
    console = RunConsole(recipe.run.steps, sample_name=sample_name(recipe))
    console.summary(summarise(directory), paths)
    _compare(recipe, console)


def _compare(recipe: Recipe, console: RunConsole) -> None:
    """Show what was predicted beside what was measured, where there is both."""
    found = compare(recipe.run.directory, sample_name(recipe))
    if found is not None:
        console.comparison(found)


def _explain(recipe: Recipe) -> None:
    """Say where the time of the profiled steps went, and leave a page of it; a finished run never fails by this."""
    from headway.cli.explain import rendered
    from headway.explain import explain, write_page

    directory = RunDirectory(recipe.run.directory)
    console = RunConsole(recipe.run.steps)
    try:
        report = explain([directory.path])
        typer.echo("\n" + rendered(report))
        write_or_tell(directory.report_file, lambda path: write_page(report, path))
        console.message(f"the whole report: {directory.report_file}", "good")
    except UserError as error:
        console.message(f"the profile can't be explained: {error}", "warning")
