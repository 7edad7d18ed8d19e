"""One way to run a recipe on some devices: what a plan chooses, and how a recipe says it."""

from typing import Any, Literal, NamedTuple

from headway.recipe import Recipe, Sizes

Checkpointing = Literal["none", "selective", "full"]
Precision = Literal["bfloat16", "float32"]


class Choice(NamedTuple):
    """Layout, micro-batch, activation checkpointing, precision and what is freed after a forward pass."""

    devices: int
    dp_replicate: int
    dp_shard: int
    tp: int
    cp_ring: int
    cp_ulysses: int
    pp: int
    schedule: str
    """A pipeline's; "1f1b" without one."""
    stages_per_rank: int
    ep: int
    micro_batch: int
    checkpointing: Checkpointing
    precision: Precision
    reshard: bool
    """Whether gathered blocks are freed between forward and backward."""

    @property
    def cp(self) -> int:
        """Ranks that share one sequence."""
        return self.cp_ring * self.cp_ulysses

    @property
    def sizes(self) -> Sizes:
        """Ranks of each axis."""
        return Sizes(
            self.pp, self.dp_replicate, self.dp_shard, self.cp_ring, self.cp_ulysses, self.tp, self.ep
        )  # fmt: skip

    @property
    def name(self) -> str:
        """In few words: what is not 1, and the policies."""
        axes = {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "tp": self.tp,
            "cp_ring": self.cp_ring,
            "cp_ulysses": self.cp_ulysses,
            "pp": self.pp,
            "ep": self.ep,
        }
        words = [f"{axis}={size}" for axis, size in axes.items() if size > 1] or ["1 device"]
        if self.pp > 1:
            words.append(f"{self.schedule}x{self.stages_per_rank}")
        kept = "" if self.reshard or self.dp_shard * self.cp == 1 else ", keeps gathered"
        return (
            f"{' '.join(words)}, micro-batch {self.micro_batch}, recompute {self.checkpointing}{kept}, {self.precision}"
        )

    def values(self, recipe: Recipe) -> dict[str, Any]:
        """Dotted keys of ``recipe`` and what they must be."""
        kind = "ulysses" if self.cp_ring == 1 else "ring" if self.cp_ulysses == 1 else "both"
        if recipe.layout.cp_ulysses is not None:
            kind = "both"  # a recipe's key can't be taken back, only changed
        found: dict[str, Any] = {
            "layout.dp_replicate": self.dp_replicate,
            "layout.dp_shard": self.dp_shard,
            "layout.tp": self.tp,
            "layout.cp": self.cp,
            "layout.cp_kind": kind,
        }
        if kind == "both":
            found["layout.cp_ulysses"] = self.cp_ulysses
        found["layout.pp"] = self.pp
        if self.pp > 1:
            found |= {"layout.pp_schedule": self.schedule, "layout.pp_stages_per_rank": self.stages_per_rank}
        found |= {
            "layout.ep": self.ep,
            "layout.reshard_after_forward": self.reshard,
            "memory.activation_checkpointing": self.checkpointing,
        }
        if recipe.memory.offload_activations and self.checkpointing != "full":
            found["memory.offload_activations"] = False
        return found | {"precision.compute": self.precision, "run.micro_batch": self.micro_batch}

    def overrides(self, recipe: Recipe) -> list[str]:
        """As ``--set`` takes them."""
        return [f"{key}={_literal(value)}" for key, value in self.values(recipe).items()]

    def applied_to(self, recipe: Recipe) -> Recipe:
        """``recipe`` with this choice."""
        document = recipe.model_dump(mode="python")
        for key, value in self.values(recipe).items():
            section, _, name = key.partition(".")
            document[section][name] = value
        return Recipe.model_validate(document)

    def as_json(self) -> dict[str, Any]:
        """Of the layout alone, by the recipe's names."""
        return {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "tp": self.tp,
            "cp": self.cp,
            "cp_ring": self.cp_ring,
            "cp_ulysses": self.cp_ulysses,
            "pp": self.pp,
            "pp_schedule": self.schedule if self.pp > 1 else None,
            "pp_stages_per_rank": self.stages_per_rank,
            "ep": self.ep,
            "reshard_after_forward": self.reshard,
        }


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
