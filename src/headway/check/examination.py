"""What one rank of a layout does, with the product's own Trainer, and how far its numbers are from the reference."""

import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headway.check.perturbation import perturb, piece_of
from headway.check.ranks import Place, joined
from headway.check.reference import Reference, ReferenceTensors, batches, gradient_of
from headway.check.setting import EMA_DECAY, SAVED_AFTER
from headway.errors import UserError
from headway.models import BuiltModel
from headway.parallel import Masters, Piece, Ranks
from headway.recipe import Recipe
from headway.train import Checkpoints, Trainer, assemble

ROUNDING = 2.0**-21
"""A weight may be so far, relative to itself, from the reference's after a few steps, however small its update is."""


@dataclass(frozen=True)
class Difference:
    """A piece of a tensor beside the same piece of the reference."""

    piece: Piece
    largest: float
    """Largest absolute difference; NaN and infinity are as far away as can be."""
    squared_here: float
    """Sum of squares of the piece itself, and of the reference's."""
    squared_there: float


Differences = dict[str, dict[str, Difference]]
"""By quantity of the reference (``reload_`` before it after a checkpoint was loaded), then by parameter."""


@dataclass
class Findings:
    """What a rank found."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: int = 0
    differences: Differences = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    """Trained parameters of this rank that got none in the first step, though the reference's did."""
    checksums: dict[str, tuple[Piece, int]] = field(default_factory=dict)
    """By parameter, of this rank's weights after the last step: ranks with equal pieces must have equal bits."""
    problems: list[str] = field(default_factory=list)
    checkpoint: Path | None = None


def examine(
    place: Place, recipe: Recipe, built: BuiltModel, reference: Reference, saved: Path, other: Path | None
) -> Findings:
    """Train ``recipe`` in its layout and compare; save a checkpoint in ``saved``, and go on from ``other``, too.

    ``built`` is the recipe's model on meta, this process' own. ``other`` is a checkpoint that another layout saved
    after ``SAVED_AFTER`` steps; None: this layout's own.
    """
    with joined(place) as ranks:
        examination = _Examination(recipe, built, reference, ranks, saved)
        examination.train()
        loaded = other or examination.found.checkpoint
        if loaded is not None:
            examination.go_on_from(loaded)
        return examination.found


def go_on_from_each(
    place: Place,
    recipe: Recipe,
    built: BuiltModel,
    reference: Reference,
    saved: Path,
    checkpoints: Mapping[int, Path],
) -> dict[int, Differences | str]:
    """For each checkpoint, under its number, the differences of one device that goes on from it; else the error."""
    outcomes: dict[int, Differences | str] = {}
    with joined(place) as ranks:
        examination = _Examination(recipe, built, reference, ranks, saved)
        for number, checkpoint in checkpoints.items():
            examination.found = Findings()
            try:
                examination.go_on_from(checkpoint)
            except Exception:  # a checkpoint that can't be loaded is a finding about its layout
                outcomes[number] = traceback.format_exc()
                continue
            problems = examination.found.problems
            outcomes[number] = "; ".join(problems) if problems else examination.found.differences
    return outcomes


class _Examination:
    """A Trainer of this rank beside the reference."""

    def __init__(self, recipe: Recipe, built: BuiltModel, reference: Reference, ranks: Ranks, saved: Path) -> None:
        self.found = Findings()
        self.reference = reference
        self.expected = ReferenceTensors(reference)
        self.parts = assemble(recipe, ranks, recipe.run.directory, build=lambda *_, **__: built)
        self.parts.flops = cast(Any, lambda tensors: None)  # nobody reads them, and the count takes as long as a step
        perturb(self.parts, recipe)
        self.trainer = Trainer(recipe, self.parts, lambda: False, self.event, on_gradients=self.gradients)
        self.steps = list(batches(recipe, self.parts))
        self.checkpoints = Checkpoints(saved, recipe.checkpoint, lambda kind, fields: self.event(kind, **fields))

    def event(self, kind: str, **fields: Any) -> None:
        """What the Trainer and the checkpoints have to tell: what must not happen in a check is a problem."""
        if kind in ("step_skipped", "checkpoint_failed", "data_changed"):
            self.found.problems.append(f"{kind}: {fields.get('message') or fields}")

    def train(self) -> None:
        """All steps, with a checkpoint before the last."""
        for number, micro_batches in enumerate(self.steps):
            if number == SAVED_AFTER:
                self.save(number)
            result = self.trainer.step(micro_batches)
            self.found.losses.append(result.loss)
            self.found.grad_norms.append(result.grad_norm)
            self.found.samples += result.samples
            if number == 0:
                self.compare("weights_1", self.masters.local)
        self.compare_last()
        for name, local in self.masters.local.items():
            bits = zlib.crc32(local.detach().contiguous().numpy().tobytes())
            self.found.checksums[name] = (piece_of(self.masters.whole[name]), bits)

    def go_on_from(self, checkpoint: Path) -> None:
        """Load, and take the last step again."""
        try:
            self.trainer.restore(lambda state: self.checkpoints.load(checkpoint, state))
        except UserError as error:  # not the user's mistake: the same recipe saved it
            self.found.problems.append(f"reload: {error}")
            return
        if self.trainer.progress.step != SAVED_AFTER:
            self.found.problems.append(f"reload: the run goes on from step {self.trainer.progress.step}")
        self.trainer.step(self.steps[SAVED_AFTER])
        self.compare_last("reload_")

    def save(self, step: int) -> None:
        """A checkpoint after ``step`` steps."""
        self.checkpoints.save(step, self.trainer.state(), final=True)
        self.found.checkpoint = self.checkpoints.newest_good()

    @property
    def masters(self) -> Masters:
        """What this rank trains."""
        return self.parts.masters

    def gradients(self, masters: Masters) -> None:
        """Called by the Trainer in each step, before clipping."""
        step = self.trainer.progress.step + 1
        if step == 1:
            self.compare_gradients(masters)
        if self.reference.gradients_are_taken:
            for name, whole in masters.whole.items():
                masters.local[name].grad = self.expected.piece(gradient_of(step), name, piece_of(whole))

    def compare_gradients(self, masters: Masters) -> None:
        """Of the first step."""
        present = {name: local.grad for name, local in masters.local.items() if local.grad is not None}
        for name, whole in masters.whole.items():
            expected = self.expected.piece("gradient", name, piece_of(whole))
            gradient = present.get(name)
            if expected is None or not expected.numel():
                continue
            if gradient is None or gradient.shape != expected.shape:
                self.found.without_gradient.append(name)
                present.pop(name, None)
        self.compare("gradient", present)

    def compare_last(self, prefix: str = "") -> None:
        """Weights and averages after all steps."""
        averages = self.parts.ema.state_dict()[str(EMA_DECAY)]
        self.compare("weights_3", self.masters.local, prefix)
        self.compare("ema_3", {name: _local(average) for name, average in averages.items()}, prefix)

    @torch.no_grad()
    def compare(self, quantity: str, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Put this rank's pieces beside the reference's."""
        found = self.found.differences.setdefault(prefix + quantity, {})
        for name, tensor in tensors.items():
            piece = piece_of(self.masters.whole[name])
            expected = self.expected.piece(quantity, name, piece)
            if expected is not None and expected.numel():
                allowed = 0.0 if quantity == "gradient" else ROUNDING
                found[name] = _difference(piece, tensor.double(), expected.double(), allowed)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local()
    return local


def _difference(piece: Piece, here: Tensor, there: Tensor, allowed: float) -> Difference:
    apart = (here - there).abs().nan_to_num(nan=torch.inf) - allowed * there.abs()
    return Difference(
        piece=piece,
        largest=max(0.0, float(apart.max())),
        squared_here=float(here.square().sum()),
        squared_there=float(there.square().sum()),
    )
