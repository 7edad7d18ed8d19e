"""The Trainer: one loop for every objective, model and layout."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headway.data import Batch
from headway.errors import RunFailed
from headway.parallel import Masters
from headway.parallel.pipeline import check_gradients
from headway.recipe import Recipe
from headway.train.assembly import StepParts
from headway.train.flops import Flops, add
from headway.train.objectives.flow_matching import velocity
from headway.train.optimizers import load_optimizer_state, optimizer_state, set_learning_rate
from headway.train.routing import named
from headway.train.sampling import Sampler
from headway.train.schedules import learning_rate_factor


def read_on_host(values: torch.Tensor) -> list[float]:
    """The one place where a step waits for the device: a rehearsal puts its own function in its place."""
    return [float(value) for value in values.tolist()]


COUNTED = 8
"""Numbers that are added up over all ranks before the passes of a step."""


@dataclass
class Progress:
    """What a run has done so far; checkpointed."""

    step: int = 0
    """Steps done: the next step to take."""
    position: int = 0
    """Global sample index of the next step's first sample."""
    samples: int = 0
    tokens: int = 0
    bad_records: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class StepResult:
    """One step as all ranks agree on it."""

    loss: float
    """Σ loss / Σ weight over the global batch."""
    grad_norm: float
    lr: float
    samples: int
    tokens: int
    bad_records: int
    flops: Flops | None
    """Of all ranks together; None where the model cannot be counted."""
    skipped: bool
    stop: bool
    routing: dict[str, Any] | None
    """What the routers of a mixture of experts did: see ``routing.named``."""


@dataclass
class Trainer:
    """Takes steps. It knows nothing of pictures, text or ranks beyond what it is assembled from."""

    recipe: Recipe
    parts: StepParts
    stop_requested: Callable[[], bool]
    on_event: Callable[..., None]
    read_on_host: Callable[[torch.Tensor], list[float]] = read_on_host
    on_gradients: Callable[[Masters], None] | None = None
    """Sees each step's gradients when they are complete and not yet clipped."""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._countable = True
        self._gradients_checked = False
        self.lr_factor = learning_rate_factor(self.recipe.optim, self.recipe.run.steps)

    def step(self, micro_batches: list[Batch]) -> StepResult:
        """Take the next optimizer step on this rank's micro-batches of the global batch."""
        number = self.progress.step
        batches = [batch.to(self.parts.ranks.device, non_blocking=True) for batch in micro_batches]
        counts = self._counts(batches, self._flops(micro_batches))
        masters, layout, passes = self.parts.masters, self.parts.layout, self.parts.passes
        scale = self._scale(weight=counts[0])
        if layout.routing is not None:
            layout.routing.begin_step(scale, lambda: passes.losses(batches))
        losses = passes.gradients(batches, scale)
        routed = counts.new_empty(0) if layout.routing is None else layout.routing.finish_step()
        layout.laid_out.hand_over(masters)
        self._check_gradients()
        if self.on_gradients is not None:
            self.on_gradients(masters)
        totals = torch.stack([self._counted(losses), masters.squared_norm_share().to(counts)])
        dist.all_reduce(totals)
        values = self.read_on_host(torch.cat([totals, counts, routed]))
        loss_sum, squared_norm, weight, samples, tokens, bad_records, stop, *flops = values[: COUNTED + 2]
        loss = loss_sum / weight if weight else math.nan
        norm = math.sqrt(squared_norm)
        factor = self.lr_factor(number)
        set_learning_rate(self.parts.optimizers, factor)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self.parts.update(number, norm, self.recipe.optim.clip_norm)
        for optimizer in self.parts.optimizers:
            optimizer.zero_grad(set_to_none=True)
        result = StepResult(
            loss=loss,
            grad_norm=norm,
            lr=factor * self.recipe.optim.lr,
            samples=int(samples),
            tokens=int(tokens),
            bad_records=int(bad_records),
            flops=Flops(*map(int, flops)) if all(map(math.isfinite, flops)) else None,
            skipped=skipped,
            stop=stop > 0,
            routing=named(values[COUNTED + 2 :]) if layout.routing is not None else None,
        )
        self._report(number, result, weight, batches, losses)
        self._advance(result)
        return result

    def _counts(self, batches: list[Batch], flops: list[float]) -> torch.Tensor:
        """Over the global batch: weight, samples, tokens, corrupt records, ranks that want to stop, FLOPs (COUNTED,).

        Of the ranks that work on the same micro-batches one counts them.
        """
        objective = self.parts.objective
        weight = torch.stack([objective.weight(batch) for batch in batches]).double().sum()
        known = [
            sum(len(batch.positions) for batch in batches),
            sum(objective.tokens(batch) for batch in batches),
            sum(len(batch.bad_records) for batch in batches),
            self.stop_requested(),
            *flops,
        ]
        counts = torch.cat([weight.view(1), torch.tensor(known, dtype=torch.float64).to(weight.device)])
        if not self.parts.meshes.is_first_of_data_rank:
            counts *= torch.tensor([0, 0, 0, 0, 1, 0, 0, 0]).to(counts)
        dist.all_reduce(counts)
        return counts

    def _flops(self, batches: list[Batch]) -> list[float]:
        """Forward, backward and recomputed FLOPs of this rank; NaN where they are not known."""
        if not self._countable:
            return [math.nan] * 3
        try:
            parts = [self.parts.flops(batch.tensors) for batch in batches]
        except Exception as error:  # any model's code may refuse to run on meta; training does not depend on it
            self._countable = False
            self.on_event("flops_unknown", message=f"no FLOPs are shown: the model does not run on meta ({error})")
            return [math.nan] * 3
        counted = [part for part in parts if part is not None]
        if len(counted) < len(parts):
            return [math.nan] * 3
        total = add(counted)
        return [float(total.forward), float(total.backward), float(total.recomputed)]

    def _check_gradients(self) -> None:
        """In a session's first step: RunFailed for a pipeline in which a parameter gets no gradient, else an event."""
        if self._gradients_checked:
            return
        self._gradients_checked = True
        if self.parts.layout.staged is not None:
            check_gradients(self.parts.masters.local)
        without = [name for name, shard in self.parts.masters.local.items() if shard.grad is None]
        if without:
            message = f"{len(without)} trained parameters got no gradient, {without[0]} among them: they do not train"
            self.on_event("parameters_without_gradient", message=message, parameters=without)

    def _scale(self, weight: torch.Tensor) -> torch.Tensor:
        """What makes a sum of losses the mean over the global batch: FSDP averages over the ranks, hence the factor."""
        return (self.parts.meshes.fsdp.size() / torch.where(weight > 0, weight, 1.0)).float()

    def _counted(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """This rank's share of the loss sum over the global batch, a float64 scalar."""
        return torch.stack(losses).double().sum() * self.parts.layout.counts_loss

    def _report(
        self, number: int, result: StepResult, weight: float, batches: list[Batch], losses: list[torch.Tensor]
    ) -> None:
        """Name corrupt records and non-finite micro-batches. Every rank sees the same counts, so all gather or none."""
        if result.bad_records:
            named = self._gather_of_data_ranks([record for batch in batches for record in batch.bad_records])
            self.on_event("bad_records", step=number, records=named)
        if result.skipped:
            culprits = [
                position
                for batch, loss in zip(batches, losses, strict=True)
                if self.parts.layout.counts_loss and not math.isfinite(self.read_on_host(loss.view(1))[0])
                for position in batch.positions
            ]
            self.on_event(
                "step_skipped",
                step=number,
                reason="no sample or token counted" if weight == 0 else "the loss or gradient norm is not finite",
                loss=result.loss,
                grad_norm=result.grad_norm,
                positions_with_non_finite_loss=sorted(self._gather(culprits)),
                positions_of_step=[self.progress.position, self.progress.position + result.samples],
            )

    def _gather_of_data_ranks(self, items: list[Any]) -> list[Any]:
        """Of all data ranks, each once, though several ranks have the same batches."""
        return self._gather(items if self.parts.meshes.is_first_of_data_rank else [])

    def _gather(self, items: list[Any]) -> list[Any]:
        gathered: list[list[Any]] = [[] for _ in range(self.parts.ranks.world)]
        dist.all_gather_object(gathered, items)
        return [item for part in gathered for item in part]

    def _advance(self, result: StepResult) -> None:
        progress = self.progress
        progress.step += 1
        progress.position += result.samples
        progress.samples += result.samples
        progress.tokens += result.tokens
        progress.bad_records += result.bad_records
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0

    def check_limits(self) -> None:
        """Raises RunFailed after too many skipped steps in a row or corrupt records: to be called after each step."""
        progress = self.progress
        if progress.skipped_in_a_row >= self.recipe.optim.max_skipped_in_a_row:
            raise RunFailed(
                f"{progress.skipped_in_a_row} steps in a row were skipped (the last is step {progress.step - 1}): "
                "nothing in them counted, or the loss or gradient norm was not finite; events.jsonl says which, and "
                "names their samples. Look at those samples, or lower optim.lr."
            )
        if progress.bad_records > self.recipe.data.max_bad_records:
            raise RunFailed(
                f"{progress.bad_records} corrupt records, more than data.max_bad_records = "
                f"{self.recipe.data.max_bad_records}; events.jsonl names them. Mend them or raise the limit."
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: trained parameters, optimizer and averages as shards, and the progress."""
        routing = self.parts.layout.routing
        return {
            "routers": {} if routing is None else routing.losses.state_dict(),
            "model": dict(self.parts.masters.whole),
            "optimizer": optimizer_state(self.parts.masters, self.parts.optimizers),
            "ema": self.parts.ema.state_dict(),
            "trainer": vars(self.progress) | {"data": self.parts.data_fingerprint},
        }

    def restore(self, load: Callable[[dict[str, Any]], None]) -> None:
        """Go on from a checkpoint; ``load`` fills a state in place."""
        state = self.state()
        load(state)
        self.parts.layout.laid_out.masters_changed()
        load_optimizer_state(self.parts.masters, self.parts.optimizers, state["optimizer"])
        self.parts.ema.load_state_dict(state["ema"])
        if self.parts.layout.routing is not None:
            self.parts.layout.routing.losses.load_state_dict(state["routers"])
        values = dict(state["trainer"])
        if values.pop("data") != self.parts.data_fingerprint:
            self.on_event("data_changed", message="the training data is not what it was when the checkpoint was saved")
        self.progress = Progress(**values)

    def draw_samples(self, sampler: Sampler) -> torch.Tensor:
        """The recipe's prompts as pictures or videos: uint8 (N, [F,] H, W, 3)."""
        self.parts.layout.laid_out.train(False)
        pictures = sampler.draw(
            lambda inputs: self.parts.passes.output(lambda model: velocity(model, inputs, sampler.recipe.guidance))
        )
        self.parts.layout.laid_out.train(True)
        return pictures

    def validation_loss(self, batches: Iterable[list[Batch]]) -> float:
        """Σ loss / Σ weight over all validation batches of all ranks, without gradients."""
        objective = self.parts.objective
        device = self.parts.ranks.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        corrupt: list[str] = []
        self.parts.layout.laid_out.train(False)
        for micro_batches in batches:
            moved = [batch.to(device, non_blocking=True) for batch in micro_batches]
            totals[0] += self._counted(self.parts.passes.losses(moved))
            if self.parts.meshes.is_first_of_data_rank:
                totals[1] += torch.stack([objective.weight(batch) for batch in moved]).double().sum()
            corrupt += [record for batch in micro_batches for record in batch.bad_records]
        self.parts.layout.laid_out.train(True)
        named = sorted(set(self._gather_of_data_ranks(corrupt)))
        if named:
            self.on_event("bad_validation_records", records=named, message=f"corrupt in validation: {named[0]}")
        dist.all_reduce(totals)
        loss, weight = self.read_on_host(totals)
        return loss / weight if weight else math.nan
