"""Counted traffic beside that of the formulas, and how they are told apart."""

from pathlib import Path
from typing import Any

from communication.cases import Case, expected
from communication.formulas import even_rows
from communication.observation import Observation, observe
from communication.traffic import Sent, Traffic
from headway.check.ranks import Place, joined, run_on_ranks
from headway.recipe import Recipe

TIMEOUT_S = 120.0


def observed(place: Place, recipe: Recipe) -> Observation:
    """On one of several ranks."""
    with joined(place):
        return observe(recipe)


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """``rows``: one for each rank, axis and collective that was counted or that the formulas expect.

    With experts ``rows_out`` too, the rows of tokens that leave each rank in all layers and micro-batches, and
    ``even_rows``, those that would if the routers chose all experts alike.
    """
    recipe = case.recipe(folder)
    everyone = run_on_ranks(case.ranks, observed, recipe, timeout_s=TIMEOUT_S)
    found: dict[str, Any] = {"rows": [r for own in everyone for r in rows_of(own, expected(recipe, own, everyone))]}
    ep = recipe.layout.ep
    if ep > 1:
        found["rows_out"] = [own.rows.total() - own.rows[own.rank % ep] for own in everyone]
        config, run = recipe.model.config, recipe.run
        tokens = case.micro_batches * run.micro_batch * recipe.data.sequence_length * config["num_hidden_layers"]
        found["even_rows"] = float(even_rows(tokens, config["num_experts_per_tok"], ep))
    return found


def rows_of(own: Observation, formula: Traffic) -> list[dict[str, Any]]:
    """One rank's."""
    nothing = Sent(0, 0)  # type: ignore[arg-type]
    rows = []
    for key in sorted({*own.traffic, *formula}):
        counted, wanted = own.traffic.get(key, nothing), formula.get(key, nothing)
        axis, collective = key
        rows.append(
            {
                "rank": own.rank,
                "axis": axis,
                "collective": collective,
                "messages": counted.messages,
                "formula_messages": wanted.messages,
                "bytes": float(counted.bytes),
                "formula_bytes": float(wanted.bytes),
            }
        )
    return rows


def differs(row: dict[str, Any]) -> bool:
    """Whether a formula does not say exactly what was counted."""
    return row["messages"] != row["formula_messages"] or row["bytes"] != row["formula_bytes"]
