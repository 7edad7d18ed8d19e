"""``headway kernels``: the fused operators, their numbers beside float64, and what their machine code says."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.recipe_show import Overrides, RecipeFile
from headway.cli.result import JsonPath, can_be_written, give_result, write_or_tell
from headway.errors import RunFailed, UserError

if TYPE_CHECKING:
    from headway.kernels.proof.accuracy import Verdict
    from headway.kernels.proof.machine_code import Facts

Names = Annotated[list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="All if left out.")]

kernels_app = typer.Typer(no_args_is_help=True, help="Fused operators, proven without a GPU.")

PAGE = """# Kernels

## Operators

Each has a reference in PyTorch, which every device without a kernel runs, and a kernel for GPUs.

{operators}

## In unmodified models

`kernels.fuse` puts operators into models of diffusers and transformers as they are: `"auto"` on CUDA, `true`
everywhere, `false` nowhere. A module is recognised by the code of its forward (or of its attention processor), not by
its name, so copies of it in other models are fused too, and a version of a library whose code has changed is left
alone. Parameters, names and modules stay; layouts, checkpointing, compilation and adapters come after.
`headway kernels fuse RECIPE` tells what is fused in a recipe's model, what is left, and why; a run writes it down as
the event `fused`. Modules whose code is known, by the classes that have it first:

{modules}

What is left on purpose: norms across heads that tensor parallelism divides (Wan); norms whose result several
modulations share (SD3.5's dual attention), which a compiler fuses better; the norm before a model's last projection
where it is no module of its own (Wan, PixArt, Sana).

## Machine code

What the machine code of each kernel says, compiled ahead of time without a GPU; written by
`headway kernels compile --table docs/kernels.md`. No row is a measurement of time.

Registers are a thread's. Loads and stores are instructions, those of 16 bytes a thread + narrower ones (one number a
token, or the few columns of a sum of parts). Inputs are bfloat16, pointers and strides multiples of 16 bytes, as
PyTorch allocates. No kernel spills, computes on bfloat16 values or has a 32-bit offset into
a tensor: the command fails if one does.

{table}
"""


@kernels_app.command("list")
def list_(json_: JsonPath = None) -> None:
    """List the fused operators.

    Example: headway kernels list
    """
    from headway.kernels import OPERATORS

    rows = [{"name": each.name, "computes": each.computes} for each in OPERATORS.values()]
    give_result({"operators": rows}, "\n".join(f"{row['name']:12} {row['computes']}" for row in rows), json_)


@kernels_app.command()
def check(
    names: Names = None,
    seed: Annotated[int, typer.Option(help="Of inputs, and of the order in which programs run.")] = 0,
    json_: JsonPath = None,
) -> None:
    """Run the kernels on Triton's interpreter, with a GPU's numbers, and hold every result against float64.

    Example: headway kernels check adaln

    An error may be twice that of PyTorch's own operations in the same precision, and one unit in the last place. Every
    load and store is checked: none is out of bounds, and no program touches what another writes.
    """
    import torch

    torch.set_num_threads(1)  # tensors are small
    rows: list[dict[str, Any]] = []
    for name, proof in _proofs(names):
        for case in proof.CASES:
            rows += [_judged(name, str(case), verdict) for verdict in proof.check(case, seed)]
    failed = [row for row in rows if not row["passed"]]
    lines = [f"{row['operator']} {row['case']}: {row['result']}: {row['error']:.3g}" for row in failed]
    text = "\n".join([*lines, f"{len(rows) - len(failed)} of {len(rows)} results hold"])
    give_result({"results": rows, "passed": not failed}, text, json_)
    if failed:
        raise RunFailed("kernels are less exact than PyTorch's own operations")


@kernels_app.command()
def fuse(recipe: RecipeFile, overrides: Overrides = None, json_: JsonPath = None) -> None:
    """Tell what a training of the recipe fuses in its model, and what it leaves as the library has it and why.

    Example: headway kernels fuse examples/demo.toml

    The model is built without weights. Training fuses on CUDA, or wherever kernels.fuse = true says so.
    """
    from headway.kernels.fusion import fuse as fuse_model
    from headway.recipe import load_recipe
    from headway.rehearse.model_on_meta import model_on_meta

    fusion = fuse_model(model_on_meta(load_recipe(recipe, overrides or ())).module)
    result = {
        "fused": [each._asdict() for each in fusion.fused],
        "left": [each._asdict() for each in fusion.left],
    }
    give_result(result, "\n".join(fusion.summary()) or "nothing is known of this model", json_)


def _judged(operator: str, case: str, verdict: "Verdict") -> dict[str, Any]:
    return {
        "operator": operator,
        "case": case,
        "result": verdict.name,
        "error": verdict.error,
        "eager_error": verdict.eager_error,
        "rms_error": verdict.rms_error,
        "passed": verdict.passed,
    }


@kernels_app.command("compile")
def compile_(
    names: Names = None,
    table: Annotated[
        Path | None, typer.Option(help="Also write the facts to this Markdown file.", callback=can_be_written)
    ] = None,
    json_: JsonPath = None,
) -> None:
    """Compile the kernels for A100, H100, B200 and MI300 and tell what their machine code says. No GPU is needed.

    Example: headway kernels compile --table docs/kernels.md
    """
    proofs = _proofs(names)
    from headway.kernels.proof.machine_code import TARGETS, broken, facts

    rows, faults = [], []
    for _, proof in proofs:
        for compiled in proof.compiled():
            for target in (each for each in TARGETS if each not in compiled.lacking):
                found = facts(compiled, target)
                faults += broken(compiled, found, target)
                rows.append((compiled.name, compiled.warps, target, found))
    text = _markdown(rows)
    if table is not None:
        write_or_tell(table, lambda path: path.write_text(_page(text)))
    result = [{"kernel": name, "warps": warps, "target": target, **vars(found)} for name, warps, target, found in rows]
    give_result({"kernels": result, "broken": faults}, text, json_)
    if faults:
        raise RunFailed("\n".join(faults))


def _page(facts: str) -> str:
    from headway.kernels import OPERATORS
    from headway.kernels.fusion import PATTERNS

    operators = [("operator", "computes"), *((f"`{each.name}`", each.computes) for each in OPERATORS.values())]
    known = [(", ".join(each.names), ", ".join(each.operators)) for each in PATTERNS]
    return PAGE.format(operators=_table(operators), modules=_table([("module", "operator"), *known]), table=facts)


def _markdown(rows: "list[tuple[str, int, str, Facts]]") -> str:
    header = ("kernel", "warps", "target", "registers", "spills", "shared memory", "loads", "stores")
    cells = [
        (
            name, str(warps), target, str(found.registers), str(found.spills), str(found.shared_memory),
            f"{found.vector_loads} + {found.other_loads}", f"{found.vector_stores} + {found.other_stores}",
        )
        for name, warps, target, found in rows
    ]  # fmt: skip
    return _table([header, *cells])


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Markdown of rows, of which the first is the header."""
    header, *cells = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, tuple("---" for _ in header), *cells))


def _proofs(names: list[str] | None) -> list[tuple[str, Any]]:
    """Raises UserError for an operator that is none, and without Triton."""
    from headway.kernels import OPERATORS

    for name in names or ():
        if name not in OPERATORS:
            raise UserError(f"{name}: no such operator; there are {', '.join(OPERATORS)}")
    if find_spec("triton") is None:
        raise UserError(
            "this needs Triton, which PyTorch for CUDA brings and PyTorch for CPUs does not: install triton"
        )
    return [(name, import_module(OPERATORS[name].proof)) for name in names or OPERATORS]
