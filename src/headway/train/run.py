"""A whole run: resume, steps, metrics, validation, samples, checkpoints, and the end that it comes to."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from headway.cluster import accelerator_of_device
from headway.data import Batch, Loader
from headway.errors import RunFailed, UserError
from headway.parallel import Ranks
from headway.recipe import Recipe, Sizes
from headway.runs import RunConsole, RunDirectory, StopSignals, clear_request, request_stop, sample_name
from headway.timeline import DATA_RANGE
from headway.train.assembly import assemble
from headway.train.checkpoint_manifest import checkpoint_path, checkpoints_in, problems
from headway.train.checkpoint_reading import one_line
from headway.train.checkpoints import Checkpoints
from headway.train.flops import utilisation
from headway.train.loading import training_loader
from headway.train.metrics import MetricsWriters, require_installed
from headway.train.module_ranges import ModuleRanges
from headway.train.picture_grid import save_grid
from headway.train.profile import StepProfile, steps_to_profile
from headway.train.throughput import StepTimer, peak_memory_gib
from headway.train.trainer import StepResult, Trainer
from headway.train.validation import validation_loader


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Steps done, over all sessions of the run."""
    stopped_by: str | None
    """Name of the signal that ended it before its last step; None: it is complete."""
    samples_file: Path | None
    """The last grid of samples."""


def run_recipe(
    recipe: Recipe,
    ranks: Ranks,
    before_first_step: Callable[[int, Callable[..., None]], None] | None = None,
    profile_steps: int = 0,
) -> Outcome:
    """Train ``recipe`` on these ranks, from its newest good checkpoint if there is one, to its end or a stop signal.

    ``before_first_step`` is told the step that this session begins with, and what writes down and shows an event; it is
    called on the ranks that give it, when all else is ready. ``profile_steps``: so many steps are profiled, and each
    rank leaves a trace of them in the run directory.
    Raises UserError for what is wrong in the recipe or its files, RunFailed when the run must not go on.
    """
    require_installed(recipe)
    if recipe.sample.prompts and recipe.objective.kind != "flow_matching":
        raise UserError(
            f"sample.prompts are drawn by diffusion models only: leave them out with objective.kind = "
            f"{recipe.objective.kind!r}"
        )
    directory = RunDirectory(recipe.run.directory, ranks.rank)
    directory.create()
    directory.check(recipe)
    console = RunConsole(recipe.run.steps, rank=ranks.rank, sample_name=sample_name(recipe))
    with _lost_ranks_told(), StopSignals(directory.path) as stop, contextlib.closing(console):
        complete = _complete(recipe, ranks, directory)
        if complete is not None:
            console.message(f"{directory.path} is complete after {complete} steps: raise run.steps to go on", "good")
            return Outcome(complete, None, directory.newest_samples())
        run = _Run(recipe, ranks, directory, console, stop)
        with contextlib.closing(run):
            return run.to_its_end(before_first_step, profile_steps)


@contextlib.contextmanager
def _lost_ranks_told() -> Iterator[None]:
    """Turn a collective's complaint that another rank is gone into RunFailed. Gloo's is a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RunFailed(
            f"another rank has ended, or does not answer ({one_line(error)}): once what ended it is mended, start the "
            "run again; it goes on from the newest checkpoint"
        ) from error


def _complete(recipe: Recipe, ranks: Ranks, directory: RunDirectory) -> int | None:
    """Steps of a run that came to its end before, and whose last checkpoint is good; None when there is more to do."""
    answer = [directory.finished_at() if ranks.is_first else None]
    dist.broadcast_object_list(answer)
    (finished,) = answer
    if finished is None or finished < recipe.run.steps:
        return None
    wrong: list[list[str]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(wrong, problems(checkpoint_path(directory.checkpoints, finished), ranks.rank, ranks.world))
    return None if any(wrong) else finished


class _Run:
    """The parts of one session of a run, and what happens between its steps."""

    def __init__(
        self, recipe: Recipe, ranks: Ranks, directory: RunDirectory, console: RunConsole, stop: StopSignals
    ) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.directory = directory
        self.console = console
        self.stop = stop
        self.unwritten: RunFailed | None = None
        self.profile: StepProfile | None = None
        self.checkpoints = Checkpoints(
            self.directory.checkpoints,
            recipe.checkpoint,
            lambda kind, fields: self.event(kind, **fields),
            timeout_s=recipe.run.timeout_s,
        )
        self.parts = assemble(recipe, ranks, self.directory.path)
        self.trainer = Trainer(recipe, self.parts, lambda: stop.pending() is not None, self.event)
        self.resume()
        self.writers = MetricsWriters(recipe, self.directory, self.event, self.trainer.progress.step)
        self.timer = StepTimer()
        self.peak_tflops = _peak_tflops(recipe, ranks)

    def event(self, kind: str, **fields: Any) -> None:
        """Show an event that has something to say to a person, then write it down: a full disk must not silence it.

        It may come from the thread of a checkpoint or a writer: that it could not be written is raised after the step.
        """
        self.console.event(kind, fields)
        try:
            self.directory.event(kind, **fields)
        except RunFailed as failure:
            self.unwritten = failure

    def stop_if_unwritten(self) -> None:
        """Raise RunFailed when an event could not be written down."""
        if self.unwritten is not None:
            raise self.unwritten

    def resume(self) -> None:
        """Load the newest good checkpoint, and make the run directory ready to go on from its step."""
        newest = self.checkpoints.newest_good() if self.recipe.checkpoint.resume else None
        if newest is None and checkpoints_in(self.directory.checkpoints):
            raise UserError(
                f"every checkpoint in {self.directory.checkpoints} is damaged (events.jsonl says how): put a good one "
                "back, or set another run.directory to start over"
            )
        if newest is not None:
            self.trainer.restore(lambda state: self.checkpoints.load(newest, state))
        step = self.trainer.progress.step
        self.directory.open(self.recipe, step)
        self.console.title(self.description())
        self.console.start(step)
        if newest is None:
            self.event("started", step=0, ranks=self.ranks.world)
        else:
            self.event(
                "resumed", step=step, ranks=self.ranks.world, message=f"resumed from {newest}, after step {step}"
            )
        if self.parts.fusion.fused:
            self.event("fused", step=step, message=self.parts.fusion.headline(), modules=self.parts.fusion.summary())

    def description(self) -> dict[str, str]:
        """What runs, for the eyes of a person."""
        parameters = list(self.parts.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        everything = sum(p.numel() for p in parameters)
        precision = self.recipe.precision
        products = "" if precision.matmul == "compute" else f", {precision.matmul} products"
        rounded = ", rounded at random" if precision.stochastic_rounding else ""
        held_out = f", {len(self.parts.validation_data):,} for validation" if self.parts.validation_data else ""
        return {
            "model": f"{self.recipe.model.class_name}, {trained:,} of {everything:,} parameters trained",
            "data": f"{self.recipe.data.kind}, {len(self.parts.training_data):,} records{held_out}",
            "layout": f"{self.ranks.world} ranks on {self.ranks.device.type}: {_layout_name(self.parts.meshes.sizes)}",
            "precision": f"{precision.compute} compute{products}, {precision.master} weights{rounded}, "
            f"{precision.reduce} reduction",
            "directory": str(self.directory.path),
        }

    def to_its_end(
        self, before_first_step: Callable[[int, Callable[..., None]], None] | None, profile_steps: int
    ) -> Outcome:
        """All steps that are left, then the last checkpoint, validation and samples."""
        progress, steps = self.trainer.progress, self.recipe.run.steps
        first = progress.step
        if first == 0:
            self.validate()
        if before_first_step is not None:
            before_first_step(first, self.event)
            self.stop_if_unwritten()
        if profile_steps:
            self.profile = self._profile(range(first, steps), profile_steps)
        for micro_batches in self._timed(self._loader()):
            result = self.trainer.step(micro_batches)
            self.timer.step_done(result.samples, result.tokens)
            self.log(result)
            self.trainer.check_limits()
            self.stop_if_unwritten()
            if result.stop:
                break
            with self.timer.outside():
                if self.profile is not None:
                    self.profile.step_done()
                self.between_steps(progress.step)
        if progress.step > first:
            self.save(final=True)
        if progress.step < steps:
            return self.stopped(progress.step)
        self.validate()
        self.sample()
        if self.ranks.is_first:
            clear_request(self.directory.path)
        self.event("finished", step=progress.step)
        self.stop_if_unwritten()
        return Outcome(progress.step, None, self.directory.newest_samples())

    def stopped(self, done: int) -> Outcome:
        """The end after ``done`` steps, which are saved, because a signal asked for it; the request stays behind."""
        signal = self.stop.pending() or "a signal to another rank"
        if self.ranks.is_first:
            request_stop(self.directory.path, signal)
        self.event("stopped", step=done, signal=signal, message=f"stopped by {signal} after step {done}, and saved")
        self.stop_if_unwritten()
        return Outcome(done, signal, self.directory.newest_samples())

    def between_steps(self, done: int) -> None:
        """What is due after ``done`` steps; the last step's is done at the end."""
        if done == self.recipe.run.steps:
            return
        if _due(done, self.recipe.metrics.validation_every):
            self.validate()
        if _due(done, self.recipe.sample.every):
            self.sample()
        if _due(done, self.recipe.checkpoint.every):
            self.save()

    def log(self, result: StepResult) -> None:
        """Write down and show a step, when it is due or was skipped."""
        done = self.trainer.progress.step
        self.console.step(done)
        if not (_due(done, self.recipe.metrics.every) or result.skipped or done == self.recipe.run.steps):
            return
        times = self.timer.read()
        progress = self.trainer.progress
        tflops, mfu, hfu = self.utilisation(result, times.step_time_s)
        line: dict[str, Any] = {
            "step": done - 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "step_time_s": times.step_time_s,
            "data_wait_s": times.data_wait_s,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "tokens_per_s": times.tokens_per_s,
            "samples_per_s": times.samples_per_s,
            "tflops_per_device": tflops,
            "mfu": mfu,
            "hfu": hfu,
            "peak_memory_gib": peak_memory_gib(self.ranks.device),
        }
        if result.routing is not None:
            line["routing"] = result.routing
        self.writers.training(line)
        self.console.training(line)

    def utilisation(self, result: StepResult, step_time_s: float) -> tuple[float | None, float | None, float | None]:
        """TFLOP/s a device, MFU and HFU, taking this step's operations for those of all steps since the last line."""
        if result.flops is None:
            return None, None, None
        tflops, mfu, hfu = utilisation(result.flops, step_time_s, self.peak_tflops)
        world = self.ranks.world
        return tflops / world, mfu and mfu / world, hfu and hfu / world

    def validate(self) -> None:
        """Measure, write down and show the validation loss of the live weights, when there is validation data."""
        source = self.parts.validation_data
        if source is None:
            return
        loader = validation_loader(
            self.recipe,
            source,
            self.parts.validation_collate,
            self.parts.meshes.data_rank,
            self.parts.meshes.sizes.data,
        )
        loss = self.trainer.validation_loss(loader)
        done = self.trainer.progress.step
        self.writers.validation(done, loss)
        self.console.validation(done, loss)

    def sample(self) -> None:
        """Draw the recipe's prompts with the averaged (or live) weights into a grid of pictures."""
        sampler = self.parts.sampler
        if sampler is None:
            return
        weights = self.recipe.sample.weights
        decays = self.parts.ema.decays
        averaged = weights == "ema" or (weights == "auto" and decays)
        with self.parts.ema.swapped_in(max(decays, default=0.0)) if averaged else contextlib.nullcontext():
            pictures = self.trainer.draw_samples(sampler)
        done = self.trainer.progress.step
        file = self.directory.samples / f"step-{done:08d}.png"
        if self.ranks.is_first:
            try:
                self.save_samples(pictures.movedim(-1, 1), file)
            except OSError as error:
                message = f"the samples after {done} steps could not be saved as {file}: {error.strerror or error}"
                self.event("samples_not_saved", step=done, message=message)
                return
            self.writers.picture(done, "samples", file)
        self.event("sampled", step=done, file=str(file))

    def save_samples(self, pictures: torch.Tensor, file: Path) -> None:
        """A grid of uint8 (N, 3, [F,] H, W), held-out captions under a heading of their own."""
        recipe = self.recipe.sample
        captions = [prompt for prompt in recipe.prompts for _ in range(recipe.per_prompt)]
        held_out = {caption.casefold() for caption in self.recipe.data.hold_out}
        order = sorted(range(len(captions)), key=lambda number: captions[number].casefold() in held_out)
        first_held_out = sum(caption.casefold() not in held_out for caption in captions)
        columns = max(1, 8 // recipe.per_prompt) * recipe.per_prompt
        headings = {}
        if 0 < first_held_out < len(captions):
            headings = {0: "Captions trained on", first_held_out: "Captions never trained on"}
        save_grid(pictures[order], [captions[number] for number in order], file, columns=columns, headings=headings)

    def save(self, final: bool = False) -> None:
        """Save a checkpoint; training stands still only for the copy to host memory unless it is the ``final`` one.

        Raises RunFailed when the final one can't be saved: what was trained since the one before would be lost unsaid.
        """
        done = self.trainer.progress.step
        with record_function("save_checkpoint"):
            stall = self.checkpoints.save(done, self.trainer.state(), final=final)
        self.event("checkpoint_started", step=done, stall_s=stall)
        if final and not self.checkpoints.finish():
            raise RunFailed(
                f"the last checkpoint, after step {done}, could not be saved (see above): mend what is in its way and "
                "start the run again; it goes on from the newest checkpoint that there is"
            )

    def close(self) -> None:
        """Wait for what is being written, and close what is open."""
        if self.profile is not None:
            self.profile.close()
        self.checkpoints.finish()
        self.writers.close()

    def _profile(self, session: range, count: int) -> StepProfile | None:
        """What profiles ``count`` steps of the session; None when it is too short."""
        steps = steps_to_profile(session, count, self._interrupted)
        if not steps:
            message = f"{len(session)} steps are too few to profile any: the first is left out"
            self.event("profile_left_out", step=session.start, message=message)
            return None
        modules = ModuleRanges(self.parts, compiled=self.recipe.run.compile)
        return StepProfile(steps, session.start, self.ranks, self.parts.meshes, self.directory, modules, self.event)

    def _interrupted(self, done: int) -> bool:
        recipe = self.recipe
        return any(
            _due(done, every)
            for every in (recipe.metrics.validation_every, recipe.sample.every, recipe.checkpoint.every)
        )

    def _loader(self) -> Loader:
        progress, run = self.trainer.progress, self.recipe.run
        return training_loader(
            self.recipe,
            self.parts,
            range(progress.step, run.steps),
            start_position=progress.position,
            workers=self.recipe.data.workers,
            prefetch=self.recipe.data.prefetch,
            pin_memory=self.ranks.device.type == "cuda",
        )

    def _timed(self, loader: Loader) -> Iterator[list[Batch]]:
        """The loader's steps, with the time that they are waited for on the timer."""
        steps = iter(loader)
        self.timer.start()
        while True:
            with self.timer.data_wait(), record_function(DATA_RANGE):
                micro_batches = next(steps, None)
            if micro_batches is None:
                return
            yield micro_batches


def _layout_name(sizes: Sizes) -> str:
    """The axes of several ranks, for the eyes of a person."""
    names = {
        "replicas": sizes.dp_replicate,
        "shards": sizes.dp_shard,
        "tensor parallel": sizes.tp,
        "context parallel": sizes.cp,
        "pipeline stages": sizes.pp,
        "expert parallel": sizes.ep,
    }
    return ", ".join(f"{size} {name}" for name, size in names.items() if size > 1) or "one device"


def _peak_tflops(recipe: Recipe, ranks: Ranks) -> float | None:
    """Dense peak of the accelerator in the precision of the products, where the catalogue has it."""
    if ranks.device.type != "cuda":
        return None
    accelerator = accelerator_of_device(torch.cuda.get_device_name(ranks.device))
    return accelerator.peak_tflops(recipe.precision.products) if accelerator else None


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
