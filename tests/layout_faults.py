"""Faults of layouts that were really made somewhere, each planted into the product by a patch.

They train without an error, and most leave the loss of the first step as it is. A fault that a new kind of layout makes
possible is added to ``FAULTS``: a function that patches the product, the layout that shows it, and what must tell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

import headway.parallel.data_parallel
import headway.train.trainer
from headway.parallel import FullyShardedModel, Masters
from headway.parallel.context_parallel import SequenceSplit, ring
from headway.parallel.context_parallel.split import CausalSplit
from headway.parallel.pipeline import Pipeline
from headway.parallel.pipeline.shared import SharedParameters
from headway.parallel.tensor_parallel_styles import (
    Division,
    KeyValueColumn,
    NormAcrossHeads,
    Part,
    PartialGradients,
    of_whole,
    shard,
    with_forward,
)
from headway.train import Ema, Trainer
from headway.train.objectives.flow_matching import FlowMatchingCollate
from headway.train.objectives.next_token import NextTokenCollate
from headway.train.passes import SequentialPasses
from headway.train.routing import Routing

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """One fault and where it shows."""

    plant: Plant
    model: str
    """A key of ``test_check_faults.RECIPES``."""
    layout: str
    shows: str
    """The error that must be above its bound, or words of the reason."""


def wrapped(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that gets the old one first."""
    old = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **keywords: around(old, *arguments, **keywords))


def copies(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {key: value.clone() for key, value in own.items()} for name, own in state.items()}


# Data parallelism and the step


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch's loss is divided by its own weight, then averaged."""

    def gradients(self: SequentialPasses, batches: list[Any], scale: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for index, batch in enumerate(batches):
            self.laid_out.begin_micro_batch(last=index == len(batches) - 1)
            loss = self.objective.loss(self.model, batch)
            self.laid_out.backward(loss / self.objective.weight(batch) / len(batches))
            losses.append(loss.detach())
        return losses

    patch.setattr(SequentialPasses, "gradients", gradients)


def norm_clipped_per_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the norm of its own shards."""

    def clip(old: Any, self: Masters, norm: float, limit: float | None) -> None:
        old(self, float(torch.nn.utils.get_total_norm(self.gradients())), limit)

    wrapped(patch, Masters, "clip_gradients", clip)


def noise_seeded_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Ranks draw noise by their number in place of the sample's."""

    def normal(old: Any, self: Any, stream: str, positions: list[int], step: int, shape: Any) -> torch.Tensor:
        return old(self, stream, [100 * dist.get_rank() + place for place in range(len(positions))], step, shape)

    wrapped(patch, FlowMatchingCollate, "_normal", normal)


def ema_updated_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """Averages take in the weights that the step began with."""

    def clip(old: Any, self: Any, *arguments: Any) -> None:
        self.before_step = [shard.detach().clone() for shard in self.local.values()]
        old(self, *arguments)

    def update(old: Any, self: Any, step: int) -> None:
        after = [shard.clone() for shard in self._shards]
        for shard_, before in zip(self._shards, self._masters.before_step, strict=True):
            shard_.copy_(before)
        old(self, step)
        for shard_, value in zip(self._shards, after, strict=True):
            shard_.copy_(value)

    wrapped(patch, Masters, "clip_gradients", clip)
    wrapped(patch, Ema, "update", torch.no_grad()(update))


def last_micro_batch_dropped(patch: pytest.MonkeyPatch) -> None:
    """The last micro-batch of a step is counted, and not trained on."""

    def gradients(old: Any, self: Any, batches: list[Any], scale: torch.Tensor) -> list[torch.Tensor]:
        return [*old(self, batches[:-1], scale), torch.zeros(())]

    wrapped(patch, SequentialPasses, "gradients", gradients)


def last_bucket_dropped(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the last parameters is not handed on."""

    def hand_over(old: Any, self: Any, masters: Masters) -> None:
        old(self, masters)
        for shard_ in list(masters.local.values())[-3:]:
            shard_.grad = torch.zeros_like(shard_)

    wrapped(patch, FullyShardedModel, "hand_over", hand_over)


def synchronised_on_the_first_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Gradients are reduced with the first micro-batch, those of the others stay on the rank."""

    def begin(old: Any, self: Any, last: bool) -> None:
        old(self, not last)

    wrapped(patch, FullyShardedModel, "begin_micro_batch", begin)


def one_block_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """The replicas' gradients of one block are never brought together."""

    def begin(old: Any, self: Any, last: bool) -> None:
        old(self, last)
        self._units[1].set_requires_all_reduce(False, recurse=False)

    wrapped(patch, FullyShardedModel, "begin_micro_batch", begin)


def wrong_divide_factor(patch: pytest.MonkeyPatch) -> None:
    """One unit of FSDP sums gradients where the others average them."""

    def begin(old: Any, self: Any, last: bool) -> None:
        old(self, last)
        unit: FSDPModule = self._units[2]
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    wrapped(patch, FullyShardedModel, "begin_micro_batch", begin)


def optimizer_state_lost_on_reload(patch: pytest.MonkeyPatch) -> None:
    """A run that goes on loads into copies of the optimizer's state, and keeps what it has."""
    wrapped(patch, headway.train.trainer, "optimizer_state", lambda old, *arguments: copies(old(*arguments)))
    patch.setattr(headway.train.trainer, "load_optimizer_state", lambda *arguments: None)


def averages_lost_on_reload(patch: pytest.MonkeyPatch) -> None:
    """A run that goes on loads into copies of the averages, and keeps what it has."""
    wrapped(patch, Ema, "state_dict", lambda old, *arguments: copies(old(*arguments)))
    patch.setattr(Ema, "load_state_dict", lambda self, state: None)


def padding_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    """What fills up short sequences is predicted too."""

    def collate(old: Any, self: NextTokenCollate, *arguments: Any) -> dict[str, torch.Tensor]:
        batch = old(self, *arguments)
        ignored = batch["labels"] == self.objective.ignore_index
        return batch | {"labels": batch["labels"].masked_fill(ignored, self.pad_token)}

    wrapped(patch, NextTokenCollate, "__call__", collate)


# Tensor parallelism


def norm_gradient_not_reduced_over_tp(patch: pytest.MonkeyPatch) -> None:
    """Norms of heads or tokens are alike on all ranks, and each rank keeps its part of their gradient."""

    def apply(self: PartialGradients, module: Any, division: Division) -> None:
        division.give(module, **{name: Part(Replicate(), Replicate()) for name in module._parameters})

    patch.setattr(PartialGradients, "apply", apply)


def norm_across_own_heads(patch: pytest.MonkeyPatch) -> None:
    """A norm over the channels of all heads sees those of a rank's heads."""

    def forward(norm: Any, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, states.shape[-1:], norm.weight, norm.eps)

    def apply(self: NormAcrossHeads, module: Any, division: Division) -> None:
        module.__class__ = with_forward(type(module), forward)
        division.give(module, weight=shard(0))

    patch.setattr(NormAcrossHeads, "apply", apply)


def wrong_key_value_head(patch: pytest.MonkeyPatch) -> None:
    """With fewer key-value heads than ranks, ranks take them in turn, not those of their queries."""

    def part(self: KeyValueColumn, layer: Any, division: Division) -> Part:
        width = layer.weight.shape[0] // self.heads
        return of_whole(0, ((division.rank % self.heads * width, width),))

    patch.setattr(KeyValueColumn, "part", part)


def tied_weights_untied(patch: pytest.MonkeyPatch) -> None:
    """Embedding and head are divided one by one, and become two parameters."""

    def store(old: Any, self: Division, parameter: Any, placement: Any) -> Any:
        self._stored.clear()
        return old(self, parameter, placement)

    wrapped(patch, Division, "_store", store)


# Context parallelism


def gradients_averaged_over_cp(patch: pytest.MonkeyPatch) -> None:
    """What cp ranks hold of a gradient are parts, not estimates: averaged, all gradients are 1/cp of what they are."""

    def scale(self: Trainer, weight: torch.Tensor) -> torch.Tensor:
        return (self.parts.meshes.sizes.data / weight).float()

    patch.setattr(Trainer, "_scale", scale)


def positions_restarted(patch: pytest.MonkeyPatch) -> None:
    """Every rank's tokens have the positions of the first rank's."""

    def batch(old: Any, self: SequenceSplit, ids: Any, labels: Any, positions: Any, **keywords: Any) -> Any:
        part = old(self, ids, labels, positions, **keywords)
        return part | {"position_ids": positions[:, : part["input_ids"].shape[1]]}

    wrapped(patch, SequenceSplit, "batch", batch)


def labels_shifted_within_shards(patch: pytest.MonkeyPatch) -> None:
    """The last token of each rank's part predicts nothing."""

    def batch(old: Any, self: SequenceSplit, *arguments: Any, ignore_index: int, packed: bool) -> Any:
        part = old(self, *arguments, ignore_index=ignore_index, packed=packed)
        part["labels"] = part["labels"].clone()
        part["labels"][:, -1] = ignore_index
        return part

    wrapped(patch, SequenceSplit, "batch", batch)


def attention_across_documents(patch: pytest.MonkeyPatch) -> None:
    """Attention of its own kind gets no mask from the library, and nobody tells it where documents end."""

    def batch(old: Any, self: SequenceSplit, *arguments: Any, **keywords: Any) -> Any:
        return old(self, *arguments, **keywords) | {"document_ids": None}

    wrapped(patch, SequenceSplit, "batch", batch)


def ring_without_rescaling(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a ring are added up with the weight of their own softmax."""

    def merge(out: torch.Tensor, log_sum: torch.Tensor, part: Any) -> None:
        out.add_(part.out)
        log_sum.copy_(torch.logaddexp(log_sum, part.log_sum.double()))

    patch.setattr(ring, "_merge", merge)


def ulysses_on_a_zigzag(patch: pytest.MonkeyPatch) -> None:
    """All-to-all joins the ranks' tokens in rank order, and they are split in another one."""

    def piece(self: CausalSplit, length: int, ring_rank: int, ulysses_rank: int) -> list[slice]:
        chunk = length // (2 * self.ulysses)
        places = (ulysses_rank, 2 * self.ulysses - 1 - ulysses_rank)
        return [slice(place * chunk, (place + 1) * chunk) for place in places]

    patch.setattr(CausalSplit, "piece", piece)


# Pipelines


def pipeline_loss_divided_twice(patch: pytest.MonkeyPatch) -> None:
    """The schedule averages over the micro-batches, as torch's do by default, on top of the global weight."""

    def forward_backward(old: Any, self: Pipeline, batches: list[Any], scale: torch.Tensor) -> list[torch.Tensor]:
        return old(self, batches, scale / len(batches))

    wrapped(patch, Pipeline, "forward_backward", forward_backward)


def tied_embedding_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the head is added to the tied embedding's twice."""

    def take(old: Any, self: SharedParameters, shared: Any) -> torch.Tensor | None:
        gradient = old(self, shared)
        return None if gradient is None else 2 * gradient

    wrapped(patch, SharedParameters, "_take_gradient", take)


def freed_before_the_split_backward(patch: pytest.MonkeyPatch) -> None:
    """A schedule that splits the backward, over blocks that FSDP2 frees after their forward."""
    patch.setattr(headway.parallel.data_parallel, "reshards_after_forward", lambda layout: True)


# Experts


def expert_gradients_not_divided(patch: pytest.MonkeyPatch) -> None:
    """Experts' gradients are divided by the ranks that hold the same ones, not by those that others are divided by."""

    def shard_experts(old: Any, model: Any, mesh: Any, policy: Any, *, data_ranks: int, **keywords: Any) -> None:
        old(model, mesh, policy, data_ranks=mesh["expert_shard"].size(), **keywords)

    wrapped(patch, headway.parallel.data_parallel, "shard_experts", shard_experts)


def router_loads_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """The balance loss uses the loads of a rank's own tokens."""
    patch.setattr(Routing, "_summed", lambda self: self.losses.take_totals())


FAULTS = [
    Fault(mean_of_means, "decoder", "dp_shard=2", "grad_error"),
    Fault(norm_clipped_per_rank, "decoder", "dp_shard=2", "update_error"),
    Fault(noise_seeded_by_rank, "video", "dp_shard=2", "loss_error"),
    Fault(ema_updated_before_the_step, "decoder", "dp_shard=2", "ema_error"),
    Fault(last_micro_batch_dropped, "decoder", "dp_shard=2", "grad_error"),
    Fault(last_bucket_dropped, "decoder", "dp_shard=2", "grad_error"),
    Fault(synchronised_on_the_first_micro_batch, "decoder", "dp_shard=2", "grad_error"),
    Fault(one_block_not_reduced, "decoder", "dp_replicate=2", "no gradient"),
    Fault(wrong_divide_factor, "decoder", "dp_shard=2", "grad_error"),
    Fault(optimizer_state_lost_on_reload, "decoder", "dp_shard=2", "reload_error"),
    Fault(averages_lost_on_reload, "decoder", "dp_shard=2", "reload_error"),
    Fault(padding_in_the_loss, "documents", "dp_shard=2", "loss_error"),
    Fault(norm_gradient_not_reduced_over_tp, "decoder", "tp=2", "differ between ranks"),
    Fault(norm_gradient_not_reduced_over_tp, "decoder", "tp=2,sequence_parallel=false", "grad_error"),
    Fault(norm_across_own_heads, "video", "tp=2", "grad_error"),
    Fault(wrong_key_value_head, "decoder", "tp=4", "grad_error"),
    Fault(tied_weights_untied, "decoder", "tp=2", "grad_error"),
    Fault(gradients_averaged_over_cp, "decoder", "cp=2", "grad_error"),
    Fault(positions_restarted, "decoder", "cp=2", "grad_error"),
    Fault(labels_shifted_within_shards, "decoder", "cp=2", "loss_error"),
    Fault(attention_across_documents, "decoder", "cp=2", "grad_error"),
    Fault(ring_without_rescaling, "decoder", "cp=2,cp_kind=ring", "grad_error"),
    Fault(ulysses_on_a_zigzag, "decoder", "cp=2", "grad_error"),
    Fault(pipeline_loss_divided_twice, "decoder", "pp=2", "grad_error"),
    Fault(tied_embedding_counted_twice, "decoder", "pp=2", "grad_error"),
    Fault(
        freed_before_the_split_backward,
        "deep_decoder",
        "pp=2,pp_schedule=zbv,dp_shard=2,blocks_kept_gathered=0",
        "no gradient",
    ),
    Fault(expert_gradients_not_divided, "experts", "dp_shard=2,ep=2", "grad_error"),
    Fault(router_loads_of_one_rank, "experts", "dp_shard=2", "update_error"),
]
