"""Small mixtures of experts, a global batch of unequal sequences, and training steps on it in any layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headway.models.router_losses import RouterLosses, RouterReport
from headway.models.routers import find_routers
from headway.parallel import (
    LaidOutWhole,
    Masters,
    Meshes,
    apply_tensor_parallel,
    checkpoint_activations,
    cross_entropy_sum,
    shard,
)
from headway.parallel.context_parallel import SequenceSplit, apply_context_parallel_language
from headway.parallel.expert_parallel import apply_expert_parallel
from headway.recipe import LayoutRecipe, PrecisionRecipe

EXPERTS, CHOSEN, LAYERS = 8, 2, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": CHOSEN,
    "num_local_experts": EXPERTS,
}
LENGTHS = (12, 3, 7, 12, 1, 9, 5, 10)
GLOBAL_BATCH = len(LENGTHS)


def mixture(family: str, *, crowded: bool = False, **changes: Any) -> Any:
    """A float32 model with noise on every parameter; ``crowded``: every token chooses experts 0 and 1."""
    torch.manual_seed(0)
    if family == "qwen3_moe":
        sizes = SIZES | {"intermediate_size": 48, "moe_intermediate_size": 16, "norm_topk_prob": True} | changes
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    else:
        model = MixtralForCausalLM(MixtralConfig(**(SIZES | {"intermediate_size": 16} | changes)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        if crowded:
            towards = torch.randn(SIZES["hidden_size"], generator=generator)
            model.model.embed_tokens.weight += 0.1 * towards
            for layer in model.model.layers:
                layer.mlp.gate.weight[:2] += 0.1 * towards
                layer.mlp.gate.weight[2:] -= 0.1 * towards
    return model


def global_batch(step: int = 0) -> dict[str, Tensor]:
    """input_ids, labels (-100: not counted), position_ids and routed_tokens, (8, 12) each."""
    generator = torch.Generator().manual_seed(100 + step)
    length = max(LENGTHS)
    ids = torch.randint(1, SIZES["vocab_size"], (GLOBAL_BATCH, length), generator=generator)
    labels = torch.randint(1, SIZES["vocab_size"], (GLOBAL_BATCH, length), generator=generator)
    tokens = torch.arange(length) < torch.tensor(LENGTHS).unsqueeze(1)
    ignored = torch.rand(labels.shape, generator=generator) < 0.2
    return {
        "input_ids": ids.masked_fill(~tokens, 0),
        "labels": labels.masked_fill(~tokens | ignored, -100),
        "position_ids": torch.arange(length).repeat(GLOBAL_BATCH, 1),
        "routed_tokens": tokens,
    }


def micro_batches(batch: dict[str, Tensor], size: int, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """This data rank's part, each micro-batch cut to its longest sequence, rounded up to an even length."""
    parts = []
    for start in range(rank * size, GLOBAL_BATCH, ranks * size):
        part = {name: tensor[start : start + size] for name, tensor in batch.items()}
        longest = int(part["routed_tokens"].sum(1).max())
        parts.append({name: tensor[:, : longest + longest % 2] for name, tensor in part.items()})
    return parts


def predict(model: Any, batch: dict[str, Any]) -> Tensor:
    """Logits; everything but the labels goes to the model."""
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False).logits


def loss_sum(model: Any, batch: dict[str, Any]) -> Tensor:
    return cross_entropy_sum(predict(model, batch), batch["labels"], -100)


@dataclass(frozen=True)
class Layout:
    """What is not the recipe's own: samples of a micro-batch, and how blocks are recomputed, computed and compiled."""

    recipe: LayoutRecipe
    micro_batch: int
    checkpointing: Any
    compute: Any
    compiled: bool

    @property
    def ranks(self) -> int:
        assert self.recipe.dp_shard != "auto"
        return self.recipe.dp_replicate * self.recipe.dp_shard * self.recipe.cp * self.recipe.tp


def over(
    *,
    micro_batch: int = 2,
    checkpointing: Any = "none",
    compute: Any = "float32",
    compiled: bool = False,
    shard: int = 1,
    **sizes: Any,
) -> Layout:
    """By the names of the recipe's layout."""
    return Layout(LayoutRecipe(dp_shard=shard, **sizes), micro_batch, checkpointing, compute, compiled)


@dataclass(frozen=True)
class Routing:
    """What RouterLosses is asked; ``exact``: f of the same step."""

    balance: float = 0.0
    z: float = 0.0
    capacity: float | None = None
    exact: bool = False


@dataclass
class Run:
    """A model in its layout on this rank."""

    model: Any
    meshes: Meshes
    laid_out: LaidOutWhole
    masters: Masters
    losses: RouterLosses
    sequence: SequenceSplit | None

    def parts(self, batch: dict[str, Tensor], size: int) -> list[dict[str, Any]]:
        """This rank's micro-batches; of ranks that share sequences each has its tokens."""
        parts = micro_batches(batch, size, self.meshes.data_rank, self.meshes.sizes.data)
        if self.sequence is None:
            return parts
        return [
            {name: self.sequence.shard(tensor, -100 if name == "labels" else 0) for name, tensor in part.items()}
            | {"document_ids": None}
            for part in parts
        ]


def divide(
    model: Any, layout: Layout, routing: Routing
) -> tuple[Meshes, LaidOutWhole, RouterLosses, SequenceSplit | None]:
    """Everything that is done to a model before it is filled."""
    meshes = Meshes(layout.recipe, dist.get_rank(), dist.get_world_size(), "cpu")
    blocks = list(model.model.layers)
    losses = losses_of(model, routing)
    apply_tensor_parallel(model, meshes.tp, sequence=layout.recipe.sequence_parallel)
    if meshes.sizes.ep > 1:
        apply_expert_parallel(model, meshes.expert["ep"], meshes.tp)
    losses.attach(model, blocks)
    sequence = apply_context_parallel_language(model, meshes.cp) if meshes.sizes.cp > 1 else None
    if layout.compiled:
        for block in blocks:
            block.forward = torch.compile(block.forward, backend="eager")
    checkpoint_activations(blocks, layout.checkpointing)
    laid_out = shard(model, blocks, meshes, PrecisionRecipe(compute=layout.compute), layout.recipe)
    return meshes, laid_out, losses, sequence


def losses_of(model: Any, routing: Routing) -> RouterLosses:
    asked = {"balance": routing.balance, "z": routing.z, "capacity": routing.capacity}
    return RouterLosses(find_routers(model), torch.device("cpu"), **asked)  # type: ignore[arg-type]


def lay_out(model: Any, layout: Layout, routing: Routing) -> Run:
    """Of a model that is filled."""
    meshes, laid_out, losses, sequence = divide(model, layout, routing)
    masters = Masters(laid_out.parameters(), meshes.sizes.stage)
    return Run(model, meshes, laid_out, masters, losses, sequence)


@dataclass
class Step:
    """What one step found, whole."""

    loss: float
    report: RouterReport
    gradients: dict[str, Tensor]
    squared_norm: float


def train(
    family: str,
    layout: Layout,
    routing: Routing,
    steps: int = 1,
    crowded: bool = False,
    change: Callable[[Any], None] = lambda model: None,
) -> list[Step]:
    """SGD steps on this rank; ``change`` may spoil the model once it is laid out."""
    run = lay_out(mixture(family, crowded=crowded), layout, routing)
    change(run.model)
    found = []
    for number in range(steps):
        found.append(take_step(run, layout, routing, number))
        with torch.no_grad():
            for parameter in run.masters.local.values():
                parameter -= 0.5 * parameter.grad
        run.laid_out.masters_changed()
    return found


def take_step(run: Run, layout: Layout, routing: Routing, number: int) -> Step:
    """Gradients of one step, as the Trainer makes them; they stay in the masters."""
    batch = global_batch(number)
    weight, tokens = (batch["labels"] != -100).sum(), batch["routed_tokens"].sum()
    parts = run.parts(batch, layout.micro_batch)
    ranks = run.meshes.fsdp.size()
    run.losses.begin_step(ranks / tokens)
    if routing.exact:
        with run.losses.counting(), torch.no_grad():
            for part in parts:
                loss_sum(run.model, part)
        run.losses.use(summed(run.losses.take_totals()))
    total = torch.zeros(())
    for index, part in enumerate(parts):
        run.laid_out.begin_micro_batch(last=index == len(parts) - 1)
        loss = loss_sum(run.model, part)
        run.laid_out.backward(loss * ranks / weight)
        total += loss.detach() / weight / run.meshes.sizes.tp
    report = run.losses.finish_step(summed(run.losses.take_totals()))
    for name, parameter in run.laid_out.parameters().items():
        gradient: Any = parameter.grad
        assert gradient is None or gradient.placements == parameter.placements, name
    run.laid_out.hand_over(run.masters)
    gradients = {}
    for name, local in run.masters.local.items():
        assert local.grad is not None, name
        gradients[name] = run.masters.like(name, local.grad).full_tensor()
    return Step(float(summed(total)), report, gradients, float(summed(run.masters.squared_norm_share())))


def summed(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def reference(
    family: str, routing: Routing, fractions: Tensor | None = None, *, crowded: bool = False, **changes: Any
) -> Step:
    """The first step in one process, on the whole batch at once, by autograd from transformers' own router logits.

    ``fractions`` (layers, E): f, if it is not this step's.
    """
    model = mixture(family, crowded=crowded, **changes)
    model.config._experts_implementation = "eager"
    batch = global_batch()
    out = model(input_ids=batch["input_ids"], use_cache=False, output_router_logits=True)
    loss = functional.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss = loss / (batch["labels"] != -100).sum()
    real = [logits[batch["routed_tokens"].flatten()] for logits in out.router_logits]
    share = torch.stack([_chosen(logits).mean(0) for logits in real])
    probability = torch.stack([logits.softmax(-1).mean(0) for logits in real])
    balance = EXPERTS * ((share if fractions is None else fractions) * probability).sum(1).mean()
    z = torch.stack([logits.logsumexp(-1).square().mean() for logits in real]).mean()
    (loss + routing.balance * balance + routing.z * z).backward()
    entropy = torch.stack([torch.distributions.Categorical(logits=logits).entropy().mean() for logits in real])
    report = RouterReport(
        balance=EXPERTS * (share * probability).sum(1).mean().detach(),
        z=z.detach(),
        load=share.amax(1) / share.mean(1),
        entropy=entropy.detach(),
        dropped=torch.zeros(len(real)),
    )
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    return Step(float(loss.detach()), report, gradients, norm)


def _chosen(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN).indices, 1.0)


def worst_error(found: Step, expected: Step) -> tuple[float, str]:
    """The largest error of any gradient, relative to the largest of its elements, and whose."""
    assert found.gradients.keys() == expected.gradients.keys()
    errors = {
        name: float((found.gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6))
        for name, gradient in expected.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
