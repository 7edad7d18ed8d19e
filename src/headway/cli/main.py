"""The command line: ``headway COMMAND``. Commands import what they need when they run, so that help is instant."""

import io
import sys
from typing import Annotated

import typer

import headway
from headway.cli.calibrate import calibrate
from headway.cli.check import check
from headway.cli.explain import explain
from headway.cli.export import export
from headway.cli.kernels import kernels_app
from headway.cli.plan import plan
from headway.cli.quiet import quieten_libraries
from headway.cli.recipe_show import recipe_app
from headway.cli.rehearse import rehearse
from headway.cli.train import train
from headway.cli.validate import validate
from headway.errors import RunFailed, UserError

DONE, DOES_NOT_HOLD, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

app = typer.Typer(
    name="headway",
    help="Plans, runs and explains the training of generative models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(train)
app.command()(check)
app.command()(export)
app.command()(calibrate)
app.command()(plan)
app.command()(rehearse)
app.command()(explain)
app.command()(validate)
app.add_typer(recipe_app, name="recipe")
app.add_typer(kernels_app, name="kernels")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"headway {headway.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit: 0 done, 1 what was run does not hold, 2 wrong input, 130 interrupted.

    A mistake of the user is told in one line a fault; any other exception is ours, and keeps its traceback.
    """
    quieten_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what a terminal can't show
    try:
        app()
    except UserError as error:
        sys.exit(_tell(error, WRONG_INPUT))
    except RunFailed as error:
        sys.exit(_tell(error, DOES_NOT_HOLD))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _tell(error: Exception, code: int) -> int:
    for line in str(error).splitlines():
        print(f"headway: error: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
