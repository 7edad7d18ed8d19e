"""One step of a tiny model, on one process or divided over ranks, with everything that must agree between the two."""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.kernels.fusion import fuse
from headway.models import BuiltModel, build_model, next_token_logits, vision_language_logits
from headway.models.build import repeated_blocks
from headway.models.component import Component
from headway.models.families import family_of
from headway.models.text import TextFeatures
from headway.parallel import checkpoint_activations
from headway.parallel.tensor_parallel import apply_tensor_parallel
from headway.parallel.vocabulary_parallel import cross_entropy_sum
from headway.recipe import ModelRecipe, PrecisionRecipe
from ranks import run_ranks
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE, word_tokenizer

CPU = torch.device("cpu")
MICRO_BATCHES = 4
LENGTH = 16
LEARNING_RATE = 0.1
IMAGE, IMAGE_BEGINS = 120, 122
MORE_HEADS: dict[str, dict[str, Any]] = {
    "flux": {},
    "sd3": {"caption_projection_dim": 64, "dual_attention_layers": [0]},
    "wan": {"cross_attn_norm": True},
    "pixart": {"cross_attention_dim": 64},
    "sana": {"cross_attention_dim": 64, "num_cross_attention_heads": 4, "qk_norm": "rms_norm_across_heads"},
}


def with_config(recipe: ModelRecipe, **config: Any) -> ModelRecipe:
    return recipe.model_copy(update={"config": recipe.config | config})


DENOISERS = {n: with_config(r, num_attention_heads=4, **MORE_HEADS[n]) for n, r in DIFFUSION.items()}
DECODERS = LANGUAGE | VISION_LANGUAGE
PICTURED = {recipe.class_name for recipe in VISION_LANGUAGE.values()}


@dataclass(frozen=True)
class Case:
    """A model and how it is divided: over ``data`` x ``tp`` ranks."""

    recipe: ModelRecipe
    tp: int = 2
    data: int = 1
    sequence: bool = False
    checkpointing: Literal["none", "full", "selective"] = "none"
    filled: bool = False
    """Divide values that are there already, in place of a model on meta."""
    compute: str = "float32"
    compiler: Any = None
    """Of blocks; None: as they are."""
    fused: bool = False
    """With fused operators."""


@dataclass
class Outcome:
    """What a step leaves: whole tensors by name."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    unlike: list[str] = field(default_factory=list)
    """Parameters that all ranks of tp should hold alike, and do not."""
    misplaced: list[str] = field(default_factory=list)
    """Parameters whose gradient is missing or has another placement."""


def build(recipe: ModelRecipe) -> BuiltModel:
    """On meta."""
    tokenizers = dict.fromkeys(recipe.text_encoders, word_tokenizer())
    return build_model(recipe, PrecisionRecipe(compute="float32"), seed=0, tokenizers=tokenizers)


def component_of(recipe: ModelRecipe) -> Component:
    """The model of diffusers or transformers itself, on meta; built once in a process, for ranks that it forks."""
    return _component(recipe.model_dump_json())


@functools.cache
def _component(recipe: str) -> Component:
    return build(ModelRecipe.model_validate_json(recipe)).components[0]


def perturbed_weights(recipe: ModelRecipe) -> dict[str, Tensor]:
    """Initial values off unit norms, zero biases and zero gates, which hide missing gradients."""
    component = component_of(recipe)
    return {
        name: component.initial.value(name) + 0.05 * torch.randn(parameter.shape, generator=_generator(name))
        for name, parameter in named(component.module)
    }


def named(model: nn.Module) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))


def step(case: Case, component: Component, weights: dict[str, Tensor]) -> Outcome:
    """One step of SGD over four micro-batches of unequal weight, on this rank of a process group."""
    mesh = init_device_mesh("cpu", (case.data, case.tp), mesh_dim_names=("data", "tp"))
    model = divided(case, mesh, component, weights)
    total = sum(weight_of(case.recipe, index) for index in range(MICRO_BATCHES))
    losses = torch.zeros(())
    mine = list(range(mesh.get_local_rank("data"), MICRO_BATCHES, case.data))
    for index in mine:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == mine[-1])
        loss = loss_sum(case, model, index)
        losses += loss.detach()
        (loss * case.data / total).backward()
    dist.all_reduce(losses, group=mesh.get_group("data"))
    misplaced = [name for name, p in named(model) if p.requires_grad and not _fits(p)]
    gradients = {name: whole(p.grad) for name, p in named(model) if p.grad is not None}
    for _, parameter in named(model):
        if parameter.grad is not None:
            local(parameter).sub_(local(parameter.grad), alpha=LEARNING_RATE)
    updated = {name: whole(parameter) for name, parameter in named(model)}
    return Outcome(float(losses) / total, gradients, updated, _unlike(model, mesh["tp"]), misplaced)


def divided(case: Case, mesh: DeviceMesh, component: Component, weights: dict[str, Tensor]) -> Any:
    """The model of ``component`` over ``mesh``, filled with ``weights``."""
    if case.filled:
        component.fill(CPU, weights)
    model = component.module
    if case.fused:
        fuse(model, divided=case.tp > 1)
    apply_tensor_parallel(model, mesh["tp"], sequence=case.sequence)
    blocks = [block for _, block in repeated_blocks(model)]
    checkpoint_activations(blocks, case.checkpointing)
    for block in blocks if case.compiler is not None else []:
        block.forward = torch.compile(block.forward, backend=case.compiler, fullgraph=True)
    if mesh.size() > 1 or case.compute != "float32":
        policy = MixedPrecisionPolicy(getattr(torch, case.compute), torch.float32, cast_forward_inputs=False)
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh["data"], mp_policy=policy)
    if not case.filled:
        component.fill(CPU, weights)
    return model.to(CPU)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _fits(parameter: Any) -> bool:
    gradient = parameter.grad
    return gradient is not None and getattr(gradient, "placements", None) == getattr(parameter, "placements", None)


def _unlike(model: nn.Module, tp: DeviceMesh) -> list[str]:
    alike = {
        name: parameter.to_local().flatten()
        for name, parameter in named(model)
        if isinstance(parameter, DTensor)
        and (len(parameter.placements) == 1 or parameter.placements[-1].is_replicate())
    }
    if not alike or tp.size() == 1:
        return []
    here = torch.cat(list(alike.values())).detach()
    everywhere = [torch.empty_like(here) for _ in range(tp.size())]
    dist.all_gather(everywhere, here, group=tp.get_group())
    sizes = [len(values) for values in alike.values()]
    by_rank = [other.split(sizes) for other in everywhere]
    return [
        name for name, *copies in zip(alike, *by_rank, strict=True) if any(not copy.equal(copies[0]) for copy in copies)
    ]


# Micro-batches


def weight_of(recipe: ModelRecipe, index: int) -> float:
    """Σ of weights of micro-batch ``index``."""
    return float((_tokens(index)[1] >= 0).sum()) if recipe.class_name.startswith(_LANGUAGE) else 2.0 * (1 + index)


def loss_sum(case: Case, model: Any, index: int) -> Tensor:
    """Σ of weighted losses of micro-batch ``index``."""
    recipe = case.recipe
    if not recipe.class_name.startswith(_LANGUAGE):
        return (1 + index) * _velocity_error(recipe, model, index, getattr(torch, case.compute))
    ids, labels = _tokens(index)
    if recipe.class_name in PICTURED:
        return cross_entropy_sum(vision_language_logits(model, _pictures(ids, index)), labels, -100)
    two_documents = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(2, -1)
    return cross_entropy_sum(next_token_logits(model, ids, two_documents), labels, -100)


_LANGUAGE = tuple(recipe.class_name for recipe in DECODERS.values())


def _tokens(index: int) -> tuple[Tensor, Tensor]:
    """ids and labels (2, L): ever fewer labels count."""
    generator = torch.Generator().manual_seed(index)
    ids, labels = torch.randint(100, (2, 2, LENGTH), generator=generator)
    labels[:, : 1 + 4 * index] = -100
    return ids, labels


def _pictures(ids: Tensor, index: int) -> dict[str, Tensor]:
    """A picture in the first sequence of every other micro-batch."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    inputs["attention_mask"][1, -3:] = 0
    if index % 2 == 0:
        ids[0, 3] = IMAGE_BEGINS
        ids[0, 4:8] = IMAGE
        inputs["mm_token_type_ids"][0, 4:8] = 1
        inputs["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(index))
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    return inputs


def _velocity_error(recipe: ModelRecipe, model: Any, index: int, dtype: torch.dtype) -> Tensor:
    family = family_of(recipe.class_name)
    generator = torch.Generator().manual_seed(index)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    noisy = noise(2, 12, 2, 4, 4) if family.video else noise(2, 12, 4, 4)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    features = {name: TextFeatures(noise(2, 5, 32), noise(2, 32), mask) for name in family.required_encoders}
    # A thousand times these are exact in bfloat16 too.
    timestep, guidance = torch.tensor([0.125, 0.25, 0.5, 1.0, 0.125])[index : index + 2], torch.full((2,), 2.0)
    velocity = family.velocity(model, noisy.to(dtype), timestep, features, guidance)
    return (velocity.float() - noise(*velocity.shape)).square().sum()


# Agreement


def outcomes(case: Case, weights: dict[str, Tensor]) -> list[Outcome]:
    """Of every rank. What is on meta is built once and forked."""
    return run_ranks(case.data * case.tp, step, case, component_of(case.recipe), weights)


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    """Every element of every gradient and weight, relative to the largest of its tensor."""
    assert found.misplaced == []
    assert found.unlike == []
    assert abs(found.loss - expected.loss) <= 1e-5 * abs(expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.weights.keys() == expected.weights.keys()
    wrong = {name: error for name, error in errors(found, expected).items() if error > tolerance}
    assert wrong == {}


def errors(found: Outcome, expected: Outcome) -> dict[str, float]:
    """By parameter: the largest error of its gradient or its weight, relative to the largest element."""
    compared = {}
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        own = float(gradient.abs().max())
        # What is zero in exact arithmetic (a bias of keys without a norm) is rounding on both sides.
        scale = own if own > 1e-6 * largest else largest
        compared[name] = float((found.gradients[name] - gradient).abs().max()) / scale
    for name, weight in expected.weights.items():
        difference = float((found.weights[name] - weight).abs().max()) / float(weight.abs().max())
        compared[name] = max(compared.get(name, 0.0), difference)
    return compared
