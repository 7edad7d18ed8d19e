"""How many ranks each axis of a layout has, and how many micro-batches a rank: arithmetic on the recipe alone."""

import math
from dataclasses import dataclass

from headway.errors import UserError
from headway.recipe.schema import LayoutRecipe


@dataclass(frozen=True)
class Sizes:
    """How many ranks each axis has."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp_ring: int
    cp_ulysses: int
    tp: int
    ep: int

    @property
    def cp(self) -> int:
        """Ranks that share one sequence."""
        return self.cp_ring * self.cp_ulysses

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.cp * self.tp


def sizes(layout: LayoutRecipe, world: int) -> Sizes:
    """The axes' sizes over ``world`` ranks.

    Raises UserError when they do not multiply to ``world``, or when experts' ranks are not among those of a replica.
    """
    axes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "cp": layout.cp, "tp": layout.tp}
    fixed = math.prod(axes.values())
    if layout.dp_shard == "auto":
        if world % fixed:
            raise UserError(f"{_product(axes)} does not divide the {world} ranks; it can be {_divisors(world)}")
        shard = world // fixed
    else:
        shard = layout.dp_shard
        if fixed * shard != world:
            raise UserError(
                f"{_product(axes | {'dp_shard': shard})}, but the run has {world} ranks: start {fixed * shard} ranks, "
                'or set layout.dp_shard = "auto"'
            )
    ulysses = {"ulysses": layout.cp, "ring": 1, "both": layout.cp_ulysses or 1}[layout.cp_kind]
    sharing = shard * layout.cp * layout.tp
    if sharing % layout.ep:
        raise UserError(
            f"layout.ep = {layout.ep} does not divide dp_shard x cp x tp = {sharing}: experts are shared by ranks of "
            f"one replica; layout.ep can be {_divisors(sharing)}"
        )
    return Sizes(
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=shard,
        cp_ring=layout.cp // ulysses,
        cp_ulysses=ulysses,
        tp=layout.tp,
        ep=layout.ep,
    )


def _product(axes: dict[str, int]) -> str:
    """``layout.cp x tp = 2 x 4 = 8``, of the axes with more than one rank."""
    several = {name: size for name, size in axes.items() if size > 1} or {"dp_shard": 1}
    factors = " x ".join(map(str, several.values()))
    result = f" = {math.prod(several.values())}" if len(several) > 1 else ""
    return f"layout.{' x '.join(several)} = {factors}{result}"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def accumulation(global_batch: int, micro_batch: int, data_world: int) -> int:
    """Micro-batches of one rank in one step. Raises UserError when the global batch does not divide into them."""
    unit = micro_batch * data_world
    if global_batch % unit:
        below = global_batch // unit * unit
        nearest = " or ".join(str(value) for value in (below, below + unit) if value)
        raise UserError(
            f"run.global_batch = {global_batch} is not a multiple of run.micro_batch x data-parallel ranks = "
            f"{micro_batch} x {data_world} = {unit}: set run.global_batch to {nearest}, or change run.micro_batch"
        )
    return global_batch // unit
