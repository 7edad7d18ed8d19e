"""What a step is of: samples, tokens, parameters, and the floating-point operations that the Trainer counts.

They are counted once, on a model with two blocks of each of its lists, and grow with the blocks. What frozen parts do
is left to the record, for they are dear to run: a video's VAE has thousands of operators.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import lru_cache
from operator import mul

import torch
from torch import Tensor, nn

from headway.models.latents import LatentGrid
from headway.parallel import checkpoint_activations
from headway.recipe import LayoutRecipe, Recipe
from headway.rehearse.depths import depths, with_depths
from headway.rehearse.model_on_meta import model_on_meta
from headway.train.assembly import objective_of
from headway.train.flops import Flops, add, count_flops_of_parts, on_meta, run_on_meta
from headway.train.unread_batches import rehearsed_batch


@dataclass(frozen=True)
class StepSizes:
    """Of one micro-batch, and of the whole model."""

    tokens: int
    """That the model sees of a micro-batch, padding included."""
    model_flops: int
    """Forward and backward of a micro-batch, but for frozen parts."""
    recomputed_flops: int
    parameters: int
    trained_parameters: int


def step_sizes(recipe: Recipe) -> StepSizes:
    """Counted on meta tensors, whatever the layout. Raises UserError for what can't be built."""
    run = recipe.run.model_copy(update={"global_batch": recipe.run.micro_batch, "compile": False})
    plain = recipe.model_copy(update={"layout": LayoutRecipe(), "run": run})
    known = depths(plain)
    if known is None:
        return _counted(plain.model_dump_json(), ())[0]
    few = {name: min(depth, 2) for name, depth in known.items()}
    base, *blocks = _counted(with_depths(plain, few).model_dump_json(), tuple(known))
    more = [depth - few[name] for name, depth in known.items()]
    numbers = zip(*(astuple(one) for one in (base, *blocks)), strict=True)
    return StepSizes(*(own + sum(map(mul, more, each)) for own, *each in numbers))


@lru_cache(maxsize=64)
def _counted(document: str, lists: tuple[str, ...]) -> list[StepSizes]:
    """Of a recipe as JSON; then of the first block of each of ``lists``."""
    recipe = Recipe.model_validate_json(document)
    built = model_on_meta(recipe)
    objective = objective_of(recipe, built)
    checkpoint_activations([block for _, block in built.blocks], recipe.memory.activation_checkpointing)
    if built.frozen is not None and built.frozen.vae is not None:
        built.frozen.latents = _Unencoded(built.frozen.latents.grid)  # type: ignore[assignment]
    batch = rehearsed_batch(recipe, built, _empty)
    batch.tensors = on_meta(batch.tensors)
    prepared = run_on_meta(lambda: objective.prepare(batch))
    blocks = [(path.rpartition(".")[0], block) for path, block in built.blocks]
    blocks = [(name, block) for name, block in blocks if name in lists]
    parts = count_flops_of_parts(
        lambda: objective.loss_of(objective.predict(built.module, prepared), prepared),
        built.module,
        [block for _, block in blocks],
    )
    firsts = [next(place for place, (own, _) in enumerate(blocks) if own == name) for name in lists]
    return [
        _sizes(objective.tokens(batch), add(parts), built.module),
        *(_sizes(0, parts[place + 1], blocks[place][1]) for place in firsts),
    ]


def _sizes(tokens: int, flops: Flops, module: nn.Module) -> StepSizes:
    parameters = list(module.parameters())
    return StepSizes(
        tokens=tokens,
        model_flops=flops.model,
        recomputed_flops=flops.recomputed,
        parameters=_elements(parameters),
        trained_parameters=_elements(parameter for parameter in parameters if parameter.requires_grad),
    )


def _elements(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


class _Unencoded:
    """In place of a VAE: latents that nothing has made."""

    def __init__(self, grid: LatentGrid) -> None:
        self.grid = grid

    def encode(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """See VaeLatents; ``noise`` has the shape of the latents."""
        return torch.empty_like(noise)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
