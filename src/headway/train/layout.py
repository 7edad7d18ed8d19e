"""A built model in the recipe's layout: stages, what is divided inside each, sharding, and only then values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headway.errors import UserError
from headway.models import BuiltModel, find_routers
from headway.parallel import (
    KEPT_OPERATORS,
    LaidOut,
    LaidOutWhole,
    Meshes,
    Ranks,
    apply_tensor_parallel,
    check_divided,
    check_float8,
    check_tensor_parallel,
    checkpoint_activations,
    compile_blocks,
    emulate_bfloat16_products,
    has_bfloat16_instructions,
    lower_products,
    offload_activations,
    overlap_tensor_parallel,
    shard,
)
from headway.parallel.context_parallel import (
    RING_OPERATORS,
    SequenceSplit,
    apply_context_parallel_diffusion,
    apply_context_parallel_language,
    check_context_parallel,
)
from headway.parallel.expert_parallel import apply_expert_parallel, check_expert_parallel
from headway.parallel.pipeline import BlockCosts, PipelinePlan, StagedModel, plan_pipeline, split_into_stages
from headway.recipe import Recipe, Sizes
from headway.train.routing import Routing, routing_of


@dataclass(frozen=True)
class Layout:
    """A model that is laid out and filled."""

    whole: LaidOutWhole | None
    """The model; None with a pipeline."""
    staged: StagedModel | None
    """This rank's stages; None without a pipeline."""
    sequence: SequenceSplit | None
    """How a language model's sequences are shared; None when they are not."""
    routing: Routing | None
    """Of mixtures of experts."""
    counts_loss: bool
    """Whether this rank's losses are part of the sum over all ranks: of ranks with the same losses, one's are."""

    @property
    def laid_out(self) -> LaidOut:
        """What this rank has of the model."""
        laid_out = self.staged or self.whole
        assert laid_out is not None
        return laid_out


@dataclass(frozen=True)
class _Part:
    """A stage of the model, or all of it."""

    built: BuiltModel
    first: bool
    last: bool

    @property
    def main(self) -> Any:
        """The library's model that is trained: what tensor, expert and context parallelism divide."""
        return self.built.components[0].module

    @property
    def blocks(self) -> list[nn.Module]:
        """Repeated blocks of this stage in the order in which they run: text encoders' before the denoiser's."""
        main = set(self.main.modules())
        return sorted((block for _, block in self.built.blocks), key=main.__contains__)


def lay_out(
    recipe: Recipe,
    built: BuiltModel,
    meshes: Meshes,
    ranks: Ranks,
    *,
    micro_batches: int,
    costs: Callable[[], BlockCosts],
) -> Layout:
    """Lay ``built`` out on meta tensors, then fill each rank's own slices.

    ``micro_batches`` of one rank and step; ``costs`` of blocks, by which a pipeline's stages are balanced. Raises
    UserError, before anything is changed, for a layout that the model can't have.
    """
    check_float8(recipe.precision, recipe.layout, ranks.device)
    plan = _check(recipe, built, meshes, micro_batches, costs)
    if recipe.layout.async_tensor_parallel and recipe.run.compile:
        overlap_tensor_parallel(meshes.tp, ranks.device)
    # Muon orthogonalises in bfloat16 whatever the compute dtype is.
    in_bfloat16 = recipe.precision.compute == "bfloat16" or recipe.optim.kind == "muon"
    if ranks.device.type == "cpu" and in_bfloat16 and not has_bfloat16_instructions():
        emulate_bfloat16_products()
    lowered = lower_products(built.module, _main_blocks(built), recipe.precision, ranks.device, meshes.world)
    routing = routing_of(recipe, built.components[0].module, ranks.device, meshes.sizes.cp)
    mixture = bool(find_routers(built.components[0].module))
    split = split_into_stages(built.module, plan, meshes.stage) if plan is not None else None
    parts = [_Part(built, first=True, last=True)]
    if split is not None:
        names = [name for name, _ in built.blocks]
        parts = [_Part(built.on_stage(s.module, s.own(names)), s.is_first, s.is_last) for s in split.stages]
    sequence = None
    sharded = []
    for part in parts:
        sequence = _divide(recipe, part, meshes) or sequence
        if ranks.device.type == "cuda":
            check_divided(part.built.module, lowered, recipe.precision, meshes.sizes.tp)
        if routing is not None:
            routing.losses.attach(part.main, part.blocks)
        _recompute_and_compile(recipe, part, meshes.sizes, pin_memory=ranks.device.type == "cuda", mixture=mixture)
        sharded.append(shard(part.built.module, part.blocks, meshes, recipe.precision, recipe.layout))
        part.built.fill(ranks.device)
    if built.frozen is not None:
        built.frozen.materialize(ranks.device)
    layout = Layout(
        whole=sharded[0] if split is None else None,
        staged=None if split is None else StagedModel(split, meshes.pp.get_group()),
        sequence=sequence,
        routing=routing,
        counts_loss=meshes.tp.get_local_rank() == 0
        and any(part.last for part in parts)
        and (sequence is not None or meshes.context_rank == 0),
    )
    layout.laid_out.train(True)
    return layout


def _main_blocks(built: BuiltModel) -> list[tuple[str, nn.Module]]:
    """Repeated blocks of the library's model that is trained, without those of text encoders."""
    main = set(built.components[0].module.modules())
    return [(name, block) for name, block in built.blocks if block in main]


def _check(
    recipe: Recipe, built: BuiltModel, meshes: Meshes, micro_batches: int, costs: Callable[[], BlockCosts]
) -> PipelinePlan | None:
    """Refuses what can't work, and says how a pipeline is cut where there is one."""
    layout, size = recipe.layout, meshes.sizes
    main = built.components[0].module
    if size.tp > 1:
        check_tensor_parallel(main, size.tp)
        check_sequence_length(recipe, size.tp, size.cp > 1)
    check_expert_parallel(main, size.ep, size.dp_shard * size.cp * size.tp)
    check_context_parallel(main, ring=size.cp_ring, ulysses=size.cp_ulysses, tp=size.tp)
    if size.pp == 1:
        return None
    return plan_pipeline(
        layout,
        built.module,
        micro_batches=micro_batches,
        compiled=recipe.run.compile,
        checkpointing=recipe.memory.activation_checkpointing,
        costs=costs,
    )


def check_sequence_length(recipe: Recipe, tp: int, has_cp: bool) -> None:
    """Raises UserError for sequences that sequence parallelism can't split; context parallelism pads them."""
    length = recipe.data.sequence_length
    splits = recipe.objective.kind != "flow_matching" and recipe.layout.sequence_parallel and not has_cp
    if splits and length % tp:
        raise UserError(
            f"data.sequence_length = {length} is not a multiple of layout.tp = {tp}: set it to "
            f"{length // tp * tp or tp}, or set layout.sequence_parallel = false"
        )


def _divide(recipe: Recipe, part: _Part, meshes: Meshes) -> SequenceSplit | None:
    """Tensor, expert and context parallelism of a part, on meta."""
    size = meshes.sizes
    apply_tensor_parallel(part.main, meshes.tp, sequence=recipe.layout.sequence_parallel)
    if size.ep > 1:
        apply_expert_parallel(part.main, meshes.expert["ep"], meshes.tp)
    if size.cp == 1:
        return None
    if part.built.frozen is None:
        return apply_context_parallel_language(
            part.main, meshes.cp, local_multiple=size.tp if recipe.layout.sequence_parallel else 1
        )
    apply_context_parallel_diffusion(part.main, meshes.cp, first=part.first, last=part.last)
    return None


def _recompute_and_compile(recipe: Recipe, part: _Part, size: Sizes, *, pin_memory: bool, mixture: bool) -> None:
    """Activation checkpointing, offload and compilation of each block.

    Checkpointing goes inside the compiled block, so that the compiler sees what is recomputed. A ``mixture`` of experts
    has routers and exchanges that are not compiled, which the compiler can't leave from within checkpointing: its
    blocks are compiled first, in pieces.
    """
    memory = recipe.memory
    if recipe.run.compile and mixture:
        compile_blocks(part.blocks)
    kept = KEPT_OPERATORS - RING_OPERATORS if size.cp_ring > 1 else KEPT_OPERATORS
    checkpoint_activations(part.blocks, memory.activation_checkpointing, kept)
    if memory.offload_activations:
        offload_activations(part.blocks, pin_memory)
    if recipe.run.compile and not mixture:
        compile_blocks(part.blocks)
