"""One process with the whole batch, and ranks that share its sequences: losses and all gradients of the same model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from headway.models import BuiltModel, build_model
from headway.parallel import Meshes, checkpoint_activations
from headway.recipe import LayoutRecipe, ModelRecipe, PrecisionRecipe
from tiny_models import word_tokenizer

KINDS = {
    "ulysses 2": {"cp": 2},
    "ring 2": {"cp": 2, "cp_kind": "ring"},
    "ulysses 4": {"cp": 4},
    "ring 4": {"cp": 4, "cp_kind": "ring"},
    "ring 2 x ulysses 2": {"cp": 4, "cp_kind": "both", "cp_ulysses": 2},
}
"""Layouts of one sequence, by name; cp is the number of ranks."""
CPU = torch.device("cpu")

Result = dict[str, Any]
"""``loss``: a float; ``gradients``: whole, by name."""
LossSum = Callable[[nn.Module, int, Any], Tensor]
"""(model, micro-batch, how the context is split or None) -> this rank's sum of losses."""
Apply = Callable[[nn.Module, DeviceMesh], Any]


def meshes(**layout: Any) -> Meshes:
    return Meshes(LayoutRecipe(**layout), dist.get_rank(), dist.get_world_size(), "cpu")


def build(recipe: ModelRecipe) -> BuiltModel:
    """On meta, in float32."""
    tokenizers = {name: word_tokenizer() for name in recipe.text_encoders}
    return build_model(recipe, PrecisionRecipe(compute="float32"), seed=1, tokenizers=tokenizers)


class Case:
    """A model: whole, and on meta, to be laid out by ranks that are forked from this process."""

    def __init__(self, recipe: ModelRecipe) -> None:
        self.whole = build(recipe)
        self.whole.materialize(CPU)
        self.built = build(recipe)
        # Noise on every parameter: norms at 1 and gates at 0 would hide faults.
        generator = torch.Generator().manual_seed(0)
        for parameter in self.whole.module.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        self._values = [
            {
                **dict(component.module.named_parameters(remove_duplicate=False)),
                **dict(component.module.named_buffers()),
            }
            for component in self.whole.components
        ]

    def fill(self) -> BuiltModel:
        """Give the laid out model its values, this rank's slices of them."""
        for component, values in zip(self.built.components, self._values, strict=True):
            component.fill(CPU, {name: tensor.detach() for name, tensor in values.items()})
        self.built.module.to(CPU)
        return self.built

    def reference(self, loss_sum: LossSum, micro_batches: int) -> Result:
        """One process, the whole batch."""
        return run(self.whole.module, [loss_sum(self.whole.module, number, None) for number in range(micro_batches)])


def run(model: nn.Module, losses: list[Tensor]) -> Result:
    model.zero_grad()
    torch.stack(losses).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": sum(float(loss.detach()) for loss in losses), "gradients": gradients}


def parts(
    cases: dict[str, Case], losses: dict[str, LossSum], apply: Apply, layout: dict[str, Any]
) -> dict[Any, Result]:
    """By model and loss: ranks of one sequence, each with parts of the gradients, which are added up here."""
    mesh = meshes(**layout)
    results = {}
    for name, case in cases.items():
        split = apply(case.built.module, mesh.cp)
        model = case.fill().module
        for kind, loss_sum in losses.items():
            result = run(model, [loss_sum(model, 0, split)])
            for gradient in result["gradients"].values():
                dist.all_reduce(gradient)
            results[name, kind] = result
    return results


@dataclass(frozen=True)
class Sharded:
    """Parameters sharded over data and context ranks, gradients reduced with the second of two micro-batches.

    Micro-batch m of data rank r is number m·n + r. ``factor`` is in the place of the Trainer's, which makes a sum of
    the mean.
    """

    apply: Apply
    layout: dict[str, Any]
    checkpointing: Any = "none"
    factor: float | None = None

    def __call__(self, case: Case, loss_sum: LossSum) -> Result:
        mesh = meshes(**self.layout)
        split = self.apply(case.built.module, mesh.cp)
        blocks = [block for _, block in case.built.blocks]
        checkpoint_activations(blocks, self.checkpointing)
        for module in (*blocks, case.built.module):
            fully_shard(module, mesh=mesh.fsdp)
        model = case.fill().module
        assert isinstance(model, FSDPModule)
        total = 0.0
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            loss = loss_sum(model, step * mesh.sizes.data + mesh.data_rank, split)
            (loss * (mesh.fsdp.size() if self.factor is None else self.factor)).backward()
            total += float(loss.detach())
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                assert isinstance(parameter, DTensor)
                assert parameter.grad.placements == parameter.placements
                gradients[name] = parameter.grad.full_tensor()
        return {"loss": total, "gradients": gradients}


def gradient_errors(found: Result, expected: Result) -> dict[str, float]:
    """Largest elementwise error of each gradient, relative to its largest element.

    Gradients that are zero but for rounding (biases of keys) are measured against the largest gradient of all.
    """
    assert found["gradients"].keys() == expected["gradients"].keys()
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    return {
        name: float((found["gradients"][name] - gradient).abs().max() / max(float(gradient.abs().max()), floor))
        for name, gradient in expected["gradients"].items()
    }


def assert_same_gradients(found: Result, expected: Result, of: Any = "") -> None:
    errors = gradient_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"{of} {worst}: {errors[worst]:.1e}"
