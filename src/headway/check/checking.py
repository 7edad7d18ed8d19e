"""From a recipe to a verdict on each of its layouts."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.check.examination import Differences, Findings, examine, go_on_from_each
from headway.check.layouts import Layout, auto_layouts, make_layout
from headway.check.ranks import Place, RanksFailed, run_on_ranks
from headway.check.reference import Reference, compute_reference
from headway.check.rounding import one_device_bound, product_error
from headway.check.setting import Precision, recipe_of_layout, recipe_of_reference
from headway.check.shrink import shrunk
from headway.check.small_models import has_experts
from headway.check.verdict import BOUNDS, ERRORS, LayoutResult, failed, judge, refused
from headway.errors import RunFailed, UserError
from headway.models import BuiltModel, build_model
from headway.recipe import Recipe
from headway.train import read_tokenizers

NARROW_FACTOR = 2.0
"""A layout in a narrow precision may be so many times as far from float32 as one device in that precision is."""
BFLOAT16_FLOOR = 2.0**-10
"""But a quarter of a unit in the last place of bfloat16 it may: the errors of a loss may cancel by luck. In float8,
where scales depend on what a micro-batch has beside a sample, as much as one product's error."""
ONE_DEVICE = make_layout()
WITHOUT_FLOAT8 = Layout("matmul=compute", {"precision": {"matmul": "compute", "float8_all_gather": False}})
"""One device beside which the recipe's float8 products are seen: what bfloat16 alone is away from float32."""
OnLayout = Callable[[int, int, Layout, str, float], None]
"""(number, of how many, layout, how it went so far, seconds), after each layout has run."""


@dataclass(frozen=True)
class CheckResult:
    """The whole check."""

    recipe: Recipe
    """As it was checked: shrunk or not."""
    shrunk: bool
    precision: Precision
    reference: Reference
    bounds: dict[str, float]
    layouts: list[LayoutResult]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no layout is wrong or failed."""
        return not any(result.passed is False for result in self.layouts)

    def as_json(self) -> dict[str, Any]:
        """The result of ``headway check``."""
        return {
            "model": self.recipe.model.class_name,
            "shrunk": self.shrunk,
            "precision": self.precision,
            "global_batch": self.recipe.run.global_batch,
            "reference": {
                "losses": self.reference.losses,
                "grad_norms": self.reference.grad_norms,
                "trained_parameters": len(self.reference.parameters),
                "frozen_parameters": self.reference.frozen_parameters,
            },
            "bounds": self.bounds,
            "layouts": [result.as_json() for result in self.layouts],
            "holds": self.holds,
            "seconds": round(self.seconds, 3),
        }


def check_recipe(
    recipe: Recipe,
    layouts: list[Layout] | None = None,
    *,
    shrink: bool = False,
    precision: Precision = "float32",
    timeout_s: float = 300.0,
    on_layout: OnLayout = lambda *_: None,
) -> CheckResult:
    """Compare ``layouts`` of ``recipe`` (None: one of each kind and the main products) with one device.

    Runs on CPU in processes of its own; ``timeout_s`` is for each layout. Raises UserError for a recipe that is wrong
    on one device too, RunFailed when it can't be run there. Must be called from a process without a process group.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-check-") as folder:
        checked = recipe
        if shrink:
            (checked,) = run_on_ranks(1, _shrunk, recipe, Path(folder, "shrunk"), timeout_s=timeout_s)
        if layouts is None:
            language = checked.objective.kind != "flow_matching"
            layouts = auto_layouts(language=language, experts=has_experts(checked.model))
        if precision == "recipe" and checked.precision.matmul != "compute":
            layouts = [WITHOUT_FLOAT8, *layouts]
        check = Check(checked, precision, Path(folder), timeout_s)
        results = check.results(layouts, on_layout)
    return CheckResult(
        recipe=checked,
        shrunk=shrink,
        precision=precision,
        reference=check.reference,
        bounds=check.bounds,
        layouts=results,
        seconds=time.monotonic() - began,
    )


def _shrunk(place: Place, recipe: Recipe, folder: Path) -> Recipe:
    """In a process of its own, as libraries that write files keep threads, which this one must not have."""
    return shrunk(recipe, folder)


@dataclass(frozen=True)
class LayoutRun:
    """A layout that ran on its ranks."""

    layout: Layout
    findings: list[Findings]
    seconds: float

    @property
    def checkpoint(self) -> Path | None:
        """What all its ranks saved together."""
        return self.findings[0].checkpoint


class Check:
    """The reference and one device; then layouts; last, one device goes on from the checkpoint of each."""

    def __init__(self, recipe: Recipe, precision: Precision, folder: Path, timeout_s: float) -> None:
        self.recipe = recipe
        self.precision = precision
        self.folder = folder
        self.timeout_s = timeout_s
        # In a narrow precision one device sets the bounds of the layouts; its own come from the analysis of rounding.
        own = one_device_bound(recipe, precision)
        self.bounds = BOUNDS if precision == "float32" else dict.fromkeys(ERRORS, own)
        self.other_checkpoint: Path | None = None
        """Of one device, from which every layout goes on."""
        try:
            plain = recipe_of_reference(recipe, folder / "run")
            (self.reference,) = self._on_ranks(1, compute_reference, plain, folder / "reference.safetensors")
            self.built = self._built()
            self.one_device = self.run(ONE_DEVICE, "one-device")
        except RanksFailed as failure:
            raise RunFailed(f"the recipe does not run on one device: {failure}") from None
        self.other_checkpoint = self.one_device.checkpoint

    def _built(self) -> BuiltModel:
        """The model on meta, which each rank gets a copy of: building it takes as long as some of its steps."""
        recipe = recipe_of_layout(self.recipe, ONE_DEVICE, self.precision, self.folder / "run")
        made = read_tokenizers(recipe.model, recipe.run.directory)
        return build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=made)

    def results(self, layouts: list[Layout], on_layout: OnLayout = lambda *_: None) -> list[LayoutResult]:
        """One result for one device, then one for each layout."""
        runs: list[LayoutRun | LayoutResult] = [self.one_device]
        for number, layout in enumerate(layouts, start=1):
            outcome = self._tried(layout, f"layout-{number}")
            runs.append(outcome)
            told = "ran" if isinstance(outcome, LayoutRun) else outcome.status
            on_layout(number, len(layouts), layout, told, outcome.seconds)
        elsewhere = self._go_on_from_each(runs)
        results = []
        is_bfloat16 = self.precision == "bfloat16" or self.recipe.precision.matmul == "compute"
        for number, run in enumerate(runs):
            result = self.judged(run, elsewhere.get(number, {})) if isinstance(run, LayoutRun) else run
            results.append(result)
            if number == 0 and self.precision != "float32":
                floor = BFLOAT16_FLOOR if is_bfloat16 else product_error(self.recipe, self.precision)
                self.bounds = {name: max(floor, NARROW_FACTOR * result.errors[name]) for name in ERRORS}
        return results

    def run(self, layout: Layout, name: str) -> LayoutRun:
        """Run ``layout`` on its ranks; ``name`` tells its checkpoints apart. Raises UserError or RanksFailed."""
        began = time.monotonic()
        recipe = recipe_of_layout(self.recipe, layout, self.precision, self.folder / "run")
        saved = self.folder / "saved" / name
        given = (recipe, self.built, self.reference, saved, self.other_checkpoint)
        findings = self._on_ranks(layout.ranks, examine, *given)
        return LayoutRun(layout, findings, time.monotonic() - began)

    def judged(self, run: LayoutRun, elsewhere: Differences | str) -> LayoutResult:
        """``elsewhere``: what one device found that went on from the run's checkpoint, or why it could not."""
        return judge(run.layout, run.findings, elsewhere, self.reference, self.bounds, run.seconds)

    def _tried(self, layout: Layout, name: str) -> LayoutRun | LayoutResult:
        began = time.monotonic()
        try:
            return self.run(layout, name)
        except UserError as refusal:
            return refused(layout, str(refusal))
        except RanksFailed as failure:
            return failed(layout, str(failure), time.monotonic() - began)

    def _go_on_from_each(self, runs: list[LayoutRun | LayoutResult]) -> dict[int, Differences | str]:
        """By the run's number, what one device finds that goes on from its checkpoint."""
        checkpoints = {
            number: run.checkpoint
            for number, run in enumerate(runs)
            if isinstance(run, LayoutRun) and run.checkpoint is not None
        }
        recipe = recipe_of_layout(self.recipe, ONE_DEVICE, self.precision, self.folder / "run")
        saved = self.folder / "saved" / "elsewhere"
        outcome: dict[int, Differences | str]
        try:
            given = (recipe, self.built, self.reference, saved, checkpoints)
            (outcome,) = self._on_ranks(1, go_on_from_each, *given)
        except RanksFailed as failure:
            return dict.fromkeys(checkpoints, str(failure))
        return outcome

    def _on_ranks(self, world: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        return run_on_ranks(world, task, *arguments, timeout_s=self.timeout_s)
