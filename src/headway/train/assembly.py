"""From a recipe to everything that takes its steps: data, model in its layout, objective, optimizers, averages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from headway.data import Batch, Collate, Source, Tokenizer, open_sources, open_tokenizer
from headway.errors import UserError
from headway.kernels.fusion import Fusion, fuse
from headway.models import BuiltModel, DenoisingModel, build_model, image_tokens, timestep_shift
from headway.parallel import Masters, Meshes, Ranks, checkpoint_activations, clip_scale
from headway.parallel.pipeline import BlockCosts, Pipeline
from headway.recipe import FlowMatchingRecipe, NextTokenRecipe, Recipe, VisionLanguageRecipe, accumulation
from headway.train.block_costs import block_costs
from headway.train.ema import Ema
from headway.train.flops import Flops, MicroBatchFlops
from headway.train.layout import Layout, lay_out
from headway.train.objectives.flow_matching import FlowMatching, FlowMatchingCollate
from headway.train.objectives.next_token import NextToken, NextTokenCollate
from headway.train.objectives.objective import Objective
from headway.train.objectives.vision_language import VisionLanguage, VisionLanguageCollate, open_processor
from headway.train.optimizers import build_optimizers
from headway.train.passes import Passes, PipelinedPasses, SequentialPasses
from headway.train.sampling import Sampler
from headway.train.stochastic_adamw import StochasticAdamW
from headway.train.vocabulary import make_tokenizers

CountFlops = Callable[[Mapping[str, Tensor]], Flops | None]
"""Of the tensors of a micro-batch; None where they are not known."""


@dataclass
class StepParts:
    """What takes the steps of a run on this rank."""

    ranks: Ranks
    meshes: Meshes
    built: BuiltModel
    layout: Layout
    masters: Masters
    passes: Passes
    objective: Objective[Any]
    optimizers: list[torch.optim.Optimizer]
    ema: Ema
    flops: CountFlops
    data_fingerprint: str
    """Of the training data; a checkpoint holds it."""
    fusion: Fusion
    """What fused operators were put into."""

    @property
    def model(self) -> nn.Module:
        """The sharded module that is trained."""
        return self.built.module

    def update(self, step: int, norm: float, limit: float | None) -> None:
        """Take the optimizer's step number ``step`` with complete gradients, clipped; let model and averages know."""
        (first, *_) = self.optimizers
        if isinstance(first, StochasticAdamW):
            first.update(step, clip_scale(norm, limit), self.ema.due(step))
            self.layout.laid_out.masters_changed()
            return
        self.masters.clip_gradients(norm, limit)
        for optimizer in self.optimizers:
            optimizer.step()
        self.layout.laid_out.masters_changed()
        self.ema.update(step)


@dataclass
class Assembly(StepParts):
    """The parts of a run on this rank."""

    training_data: Source
    validation_data: Source | None
    collate: Collate
    validation_collate: Collate
    sampler: Sampler | None
    """Of diffusion models with prompts to draw."""


def assemble(recipe: Recipe, ranks: Ranks, directory: Path, build: Callable[..., BuiltModel] = build_model) -> Assembly:
    """Open the data, build, lay out and fill the model, and make what trains it. Raises UserError.

    Every rank must call it. ``directory`` keeps tokenizers made from captions, and indexes of the data when the recipe
    names no other place for them. ``build``: as ``build_model``, what gives the model that is laid out.
    """
    tokenizer = _language_tokenizer(recipe)
    training, validation = open_sources(
        recipe.data, cache=recipe.data.cache or directory / "data", tokenizer=tokenizer, seed=recipe.run.seed
    )
    made = make_tokenizers(recipe.model, training, directory, write=ranks.is_first)
    built = build(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=made)
    collate, validation_collate = _collates(recipe, built, tokenizer)
    step = assemble_step(recipe, ranks, built, _counts_when_asked(recipe, made), training.fingerprint)
    return Assembly(
        **vars(step),
        training_data=training,
        validation_data=validation,
        collate=collate,
        validation_collate=validation_collate,
        sampler=_sampler(recipe, built, step.meshes, ranks.device),
    )


def assemble_step(
    recipe: Recipe, ranks: Ranks, built: BuiltModel, flops: CountFlops, data_fingerprint: str
) -> StepParts:
    """Lay out and fill ``built``, and make what trains it. Every rank must call it. Raises UserError."""
    meshes = Meshes(recipe.layout, ranks.rank, ranks.world, ranks.device.type)
    micro_batches = accumulation(recipe.run.global_batch, recipe.run.micro_batch, meshes.sizes.data)
    costs = partial(block_costs_of, recipe, built)
    fusion = fuse(built.module, divided=meshes.sizes.tp > 1) if fuses(recipe, ranks.device) else Fusion()
    layout = lay_out(recipe, built, meshes, ranks, micro_batches=micro_batches, costs=costs)
    masters = Masters(layout.laid_out.parameters(), meshes.sizes.stage)
    objective = objective_of(recipe, built, layout)
    blocks = {id(parameter) for _, block in built.blocks for parameter in block.parameters()}
    matrices = [name for name, p in built.module.named_parameters() if id(p) in blocks and p.ndim == 2]
    return StepParts(
        ranks=ranks,
        meshes=meshes,
        built=built,
        layout=layout,
        masters=masters,
        passes=_passes(recipe, built, layout, meshes, objective, ranks.device),
        objective=objective,
        optimizers=build_optimizers(
            masters,
            recipe.optim,
            matrices,
            rounding_seed=recipe.run.seed if recipe.precision.stochastic_rounding else None,
        ),
        ema=Ema(masters, layout.laid_out, recipe.ema),
        flops=flops,
        data_fingerprint=data_fingerprint,
        fusion=fusion,
    )


def fuses(recipe: Recipe, device: torch.device) -> bool:
    """Whether the recipe's model gets fused operators on ``device``."""
    return device.type == "cuda" if recipe.kernels.fuse == "auto" else recipe.kernels.fuse


def _counts_when_asked(recipe: Recipe, tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> CountFlops:
    """Builds the model again for it when the first micro-batch is to be counted."""
    count = cache(
        lambda: flops_of(
            recipe, build_model(recipe.model, recipe.precision, seed=recipe.run.seed, tokenizers=tokenizers)
        )
    )
    return lambda tensors: count()(tensors)


def flops_of(recipe: Recipe, copy: BuiltModel) -> MicroBatchFlops:
    """Counts what a micro-batch costs on ``copy``: the whole model, built for this and left on meta."""
    checkpoint_activations([block for _, block in copy.blocks], recipe.memory.activation_checkpointing)
    objective = objective_of(recipe, copy)
    return MicroBatchFlops(copy.module, lambda tensors: objective.loss(copy.module, Batch(tensors, positions=[])))


def block_costs_of(recipe: Recipe, built: BuiltModel) -> BlockCosts:
    """What the blocks of ``built``, whole and on meta, cost: see ``block_costs``."""
    return block_costs(recipe, built, objective_of(recipe, built))


def _passes(
    recipe: Recipe, built: BuiltModel, layout: Layout, meshes: Meshes, objective: Objective[Any], device: torch.device
) -> Passes:
    if layout.whole is not None:
        return SequentialPasses(built.module, layout.whole, objective)
    assert layout.staged is not None
    # A denoiser is given whole latents, of which ranks of cp have their tokens between blocks; a decoder is given its
    # own tokens already, which ranks of tp split further.
    split = meshes.sizes.tp if recipe.layout.sequence_parallel else 1
    shards = split if built.frozen is None else meshes.sizes.cp
    pipeline = Pipeline(
        layout.staged,
        objective.predict,
        objective.loss_of,
        device=device,
        dtype=getattr(torch, recipe.precision.compute),
        sequence_shards=shards,
    )
    return PipelinedPasses(pipeline, objective)


def objective_of(recipe: Recipe, built: BuiltModel, layout: Layout | None = None) -> Objective[Any]:
    """The objective on a model in its layout; None: a plain one. Raises UserError for a model that it does not fit."""
    match recipe.objective:
        case FlowMatchingRecipe() as flow_matching:
            if built.frozen is None:
                name = recipe.model.class_name
                raise UserError(f"objective.kind = 'flow_matching' needs a diffusion model, not {name}")
            return FlowMatching(
                flow_matching, built.frozen, image_tokens(_denoiser(built), _latent_shape(recipe, built))
            )
        case NextTokenRecipe() as next_token:
            if built.frozen is not None:
                name = recipe.model.class_name
                raise UserError(f"objective.kind = 'next_token' needs a language model, not {name}")
            sequence = layout.sequence if layout else None
            routed = layout is not None and layout.routing is not None
            return NextToken(next_token, sequence, packed=recipe.data.packing, routed=routed)
        case VisionLanguageRecipe() as vision_language:
            if built.family != "vision_language":
                name = recipe.model.class_name
                raise UserError(f"objective.kind = 'vision_language' needs a vision-language model, not {name}")
            return VisionLanguage(vision_language, packed=False)


def _collates(recipe: Recipe, built: BuiltModel, tokenizer: Tokenizer | None) -> tuple[Collate, Collate]:
    """How micro-batches are made, for training and for validation."""
    objective = recipe.objective
    if isinstance(objective, FlowMatchingRecipe):
        collate = _flow_matching_collate(recipe, objective, built)
        return collate, replace(collate, purpose="validation")
    length = recipe.data.sequence_length
    if isinstance(objective, NextTokenRecipe):
        assert tokenizer is not None
        _check_speaks(recipe, built, tokenizer)
        packed = NextTokenCollate(objective, length, recipe.data.packing, pad_token=tokenizer.padding)
        return packed, packed
    conversations = _vision_language_collate(recipe, objective, built)
    return conversations, conversations


def _check_speaks(recipe: Recipe, built: BuiltModel, tokenizer: Tokenizer) -> None:
    """Raises UserError unless the model takes every token of the tokenizer."""
    if built.frozen is not None:
        raise UserError(f"objective.kind = 'next_token' needs a language model, not {recipe.model.class_name}")
    module: Any = built.module
    known = module.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > known:
        raise UserError(
            f"model.tokenizer has {tokenizer.vocab_size} tokens and {recipe.model.class_name} takes {known}: "
            "set vocab_size of model.config to as many, or name the model's own tokenizer"
        )


def _flow_matching_collate(recipe: Recipe, objective: FlowMatchingRecipe, built: BuiltModel) -> FlowMatchingCollate:
    if built.frozen is None:
        raise UserError(f"objective.kind = 'flow_matching' needs a diffusion model, not {recipe.model.class_name}")
    return FlowMatchingCollate(
        objective=objective,
        seed=recipe.run.seed,
        purpose="train",
        latent_shape=_latent_shape(recipe, built),
        posterior=built.frozen.vae is not None,
        caption_tokens=built.frozen.caption_tokens,
    )


def _latent_shape(recipe: Recipe, built: BuiltModel) -> tuple[int, ...]:
    assert built.frozen is not None
    return built.frozen.latent_shape(recipe.data.resolution, recipe.data.frames)


def _denoiser(built: BuiltModel) -> DenoisingModel:
    assert isinstance(built.module, DenoisingModel)
    return built.module


def _vision_language_collate(
    recipe: Recipe, objective: VisionLanguageRecipe, built: BuiltModel
) -> VisionLanguageCollate:
    folder = recipe.model.processor or recipe.model.path
    if built.family != "vision_language" or folder is None:
        raise UserError(
            "objective.kind = 'vision_language' needs a vision-language model and its processor: model.class_name is "
            f"{recipe.model.class_name}, model.processor is {folder}"
        )
    tokenizer, image_processor = open_processor(folder)
    config: Any = built.module.config
    return VisionLanguageCollate(
        objective, tokenizer, image_processor, config.image_token_id, recipe.data.sequence_length
    )


def _sampler(recipe: Recipe, built: BuiltModel, meshes: Meshes, device: torch.device) -> Sampler | None:
    if built.frozen is None or not recipe.sample.prompts:
        return None
    assert isinstance(recipe.objective, FlowMatchingRecipe)
    denoiser, shape = _denoiser(built), _latent_shape(recipe, built)
    config: Any = denoiser.transformer.config
    return Sampler(
        recipe.sample,
        built.frozen,
        latent_shape=shape,
        shift=timestep_shift(recipe.objective, image_tokens(denoiser, shape)),
        distilled=config.get("guidance_embeds", False),
        meshes=meshes,
        device=device,
        batch=recipe.run.micro_batch,
    )


def _language_tokenizer(recipe: Recipe) -> Tokenizer | None:
    if recipe.objective.kind != "next_token":
        return None
    name = recipe.model.tokenizer or recipe.model.path
    if name is None:
        raise UserError('model.tokenizer: required key is missing: a tokenizer folder, or "bytes"')
    return open_tokenizer(name)
