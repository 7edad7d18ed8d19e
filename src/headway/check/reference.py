"""What is right: the whole model in one process, trained by a plain PyTorch loop that shares no code with the Trainer.

It takes the global batch, the loss of a micro-batch and the model from the product; everything that a layout could get
wrong in between (scaling, accumulation, gradient norm, clipping, optimizer, averages) is written out here again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.check.perturbation import perturb
from headway.check.ranks import Place, joined
from headway.check.reference_routers import RouterTerms
from headway.check.setting import EMA_DECAY, STEPS, with_library_code, without_router_losses
from headway.data import Batch
from headway.parallel import Piece
from headway.recipe import NextTokenRecipe, OptimRecipe, Recipe
from headway.train import Assembly, assemble, training_loader

QUANTITIES = ("gradient", "weights_1", "weights_3", "ema_3")
"""What is compared of every trained parameter: the first step's gradient, weights and averages after so many steps."""


@dataclass(frozen=True)
class Parameter:
    """A trained parameter, in the order of the model."""

    name: str
    module: str
    """Path and class of the module that holds it."""
    shape: tuple[int, ...]
    scales: dict[str, float]
    """By quantity the largest absolute element of the gradient, or of the change since the start."""


@dataclass(frozen=True)
class Reference:
    """The numbers of the plain loop; its tensors are in a file."""

    file: Path
    parameters: list[Parameter]
    losses: list[float]
    grad_norms: list[float]
    gradients_are_taken: bool
    """Whether layouts step with the gradients of this loop, once their own have been compared: Muon makes every
    singular value of a gradient one, also those that are nothing but rounding, and layouts would soon be far apart."""
    samples: int
    frozen_parameters: int


def compute_reference(place: Place, recipe: Recipe, file: Path) -> Reference:
    """Run the plain loop in one process and write its tensors, named ``quantity/parameter``, to ``file``."""
    with joined(place) as ranks:
        parts = assemble(with_library_code(without_router_losses(recipe)), ranks, recipe.run.directory)
        perturb(parts, recipe)
        loop = _Loop(recipe, parts)
        for micro_batches in batches(recipe, parts):
            loop.step(micro_batches)
        save_file(loop.tensors, file)
        return Reference(
            file=file,
            parameters=loop.described(),
            losses=loop.losses,
            grad_norms=loop.grad_norms,
            gradients_are_taken=recipe.optim.kind == "muon",
            samples=STEPS * recipe.run.global_batch,
            frozen_parameters=sum(not p.requires_grad for p in parts.model.parameters()),
        )


def gradient_of(step: int) -> str:
    """The quantity that is the gradient of a step, counted from 1."""
    return "gradient" if step == 1 else f"gradient_{step}"


def batches(recipe: Recipe, parts: Assembly) -> Iterator[list[Batch]]:
    """This rank's micro-batches of each step, as a run would load them."""
    return iter(training_loader(recipe, parts, range(recipe.run.steps)))


class _Loop:
    """Steps on the plain module."""

    def __init__(self, recipe: Recipe, parts: Assembly) -> None:
        self.recipe = recipe
        self.objective = parts.objective
        self.model = parts.model
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.routers = (
            RouterTerms(self.model, recipe.objective) if isinstance(recipe.objective, NextTokenRecipe) else None
        )
        self.optimizers = _optimizers(self.trained, _matrices(parts), recipe.optim)
        self.first = {name: p.detach().clone() for name, p in self.trained.items()}
        self.averages = {name: p.detach().clone() for name, p in self.trained.items()}
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.tensors: dict[str, Tensor] = {}

    def step(self, micro_batches: list[Batch]) -> None:
        """Gradient of Σ loss / Σ weight over the global batch, clipped by its norm; then optimizer, then averages."""
        weight = torch.stack([self.objective.weight(batch).double() for batch in micro_batches]).sum()
        total = torch.zeros((), dtype=torch.float64)
        prepared = [self.objective.prepare(batch) for batch in micro_batches]
        if self.routers is not None:
            labels = [tensors["labels"] for tensors in prepared]
            self.routers.begin_step(labels, lambda number: self.objective.predict(self.model, prepared[number]))
        for inputs in prepared:
            loss = self.objective.loss_of(self.objective.predict(self.model, inputs), inputs).double()
            total += loss.detach()
            if self.routers is not None:
                loss = loss + self.routers.term(inputs["labels"])
            (loss / weight).backward()
        if self.routers is not None:
            self.routers.finish_step()
        self.losses.append(float(total / weight))
        self.keep(gradient_of(len(self.losses)), {n: p.grad for n, p in self.trained.items() if p.grad is not None})
        limit = self.recipe.optim.clip_norm or math.inf
        self.grad_norms.append(float(nn.utils.clip_grad_norm_(self.trained.values(), limit)))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in self.trained.items():
            self.averages[name].lerp_(parameter.detach(), 1 - EMA_DECAY)
        self.keep(f"weights_{len(self.losses)}", self.trained)
        self.keep(f"ema_{len(self.losses)}", self.averages)

    def keep(self, quantity: str, tensors: Mapping[str, Tensor]) -> None:
        """Copies of what is compared later."""
        taken = quantity.startswith("gradient") and self.recipe.optim.kind == "muon"
        if quantity in QUANTITIES or taken:
            self.tensors |= {f"{quantity}/{name}": tensor.detach().clone() for name, tensor in tensors.items()}

    def described(self) -> list[Parameter]:
        """The trained parameters with the size of what is compared of each."""
        modules = dict(self.model.named_modules())
        described = []
        for name, parameter in self.trained.items():
            path = name.rpartition(".")[0]
            kind = type(modules[path]).__name__
            shape = tuple(parameter.shape)
            described.append(Parameter(name, f"{path} ({kind})", shape, self._scales(name)))
        return described

    def _scales(self, name: str) -> dict[str, float]:
        scales = {}
        for quantity in QUANTITIES:
            value = self.tensors.get(f"{quantity}/{name}")
            if value is not None:
                change = value if quantity == "gradient" else value - self.first[name]
                scales[quantity] = float(change.abs().max())
        return scales


def _matrices(parts: Assembly) -> set[str]:
    """Names of the repeated blocks' matrices, which Muon trains."""
    inside = {id(p) for _, block in parts.built.blocks for p in block.parameters()}
    return {name for name, p in parts.model.named_parameters() if id(p) in inside and p.ndim == 2}


def _optimizers(
    trained: dict[str, nn.Parameter], matrices: set[str], optim: OptimRecipe
) -> list[torch.optim.Optimizer]:
    orthogonal = [p for name, p in trained.items() if optim.kind == "muon" and name in matrices]
    others = [p for name, p in trained.items() if not (optim.kind == "muon" and name in matrices)]
    optimizers: list[torch.optim.Optimizer] = []
    if orthogonal:
        optimizers.append(
            torch.optim.Muon(
                orthogonal, lr=optim.muon_lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if others:
        decayed = {"params": [p for p in others if p.ndim > 1], "weight_decay": optim.weight_decay}
        plain = {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0}
        groups = [group for group in (decayed, plain) if group["params"]]
        optimizers.append(torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps))
    return optimizers


class ReferenceTensors:
    """Reads pieces of the plain loop's tensors."""

    def __init__(self, reference: Reference) -> None:
        self._file = safe_open(reference.file, framework="pt")
        self._names = set(self._file.keys())

    def piece(self, quantity: str, name: str, piece: Piece) -> Tensor | None:
        """A piece of one tensor; None when the reference has no such tensor (a parameter without a gradient)."""
        key = f"{quantity}/{name}"
        if key not in self._names:
            return None
        if not piece.shape:
            value: Tensor = self._file.get_tensor(key)
            return value
        part: Tensor = self._file.get_slice(key)[piece.index()]
        return part
