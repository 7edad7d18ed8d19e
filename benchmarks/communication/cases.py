"""Layouts whose traffic is counted, and what the formulas say of each: a product's traffic is the sum of its axes'."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from communication import formulas, recipes
from communication.formulas import Shape
from communication.observation import Observation
from communication.traffic import Traffic, all_reduce, together
from headway.recipe import Recipe

MICRO_BATCH = 2
MICRO_BATCHES = 2
"""Of a rank and step, unless a case has more."""


@dataclass(frozen=True)
class Case:
    """A tiny recipe in a layout."""

    name: str
    kind: str
    """decoder, experts or denoiser."""
    ranks: int
    layout: dict[str, Any]
    micro_batches: int = MICRO_BATCHES
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def recipe(self, folder: Path) -> Recipe:
        """Its data and run directory in ``folder``."""
        sharing = math.prod(self.layout.get(axis, 1) for axis in ("tp", "cp", "pp"))
        run = {
            "micro_batch": MICRO_BATCH,
            "global_batch": MICRO_BATCH * self.micro_batches * (self.ranks // sharing),
        }
        return recipes.recipe(self.kind, folder, self.sections | {"layout": self.layout, "run": run})


CASES = [
    Case("FSDP", "decoder", 2, {}),
    Case("FSDP", "decoder", 4, {}),
    Case("FSDP, one micro-batch", "decoder", 2, {}, 1),
    Case("FSDP, blocks kept", "decoder", 2, {"reshard_after_forward": False}),
    Case("FSDP, no block kept", "decoder", 2, {"blocks_kept_gathered": 0}),
    Case("FSDP, bfloat16", "decoder", 2, {}, sections={"precision": {"compute": "bfloat16"}}),
    Case("FSDP, full checkpointing", "decoder", 2, {}, sections={"memory": {"activation_checkpointing": "full"}}),
    Case("FSDP", "denoiser", 2, {}),
    Case("DDP", "decoder", 2, {"dp_replicate": 2}),
    Case("HSDP", "decoder", 4, {"dp_replicate": 2}),
    Case("tensor parallel", "decoder", 2, {"tp": 2, "sequence_parallel": False}),
    Case("tensor parallel", "denoiser", 2, {"tp": 2}),
    Case("tensor and sequence parallel", "decoder", 2, {"tp": 2}),
    Case("tensor parallel, fewer key heads", "decoder", 4, {"tp": 4}),
    Case(
        "tensor parallel, full checkpointing",
        "decoder",
        2,
        {"tp": 2, "sequence_parallel": False},
        sections={"memory": {"activation_checkpointing": "full"}},
    ),
    Case(
        "tensor and sequence parallel, full checkpointing",
        "decoder",
        2,
        {"tp": 2},
        sections={"memory": {"activation_checkpointing": "full"}},
    ),
    Case(
        "tensor parallel, selective checkpointing",
        "decoder",
        2,
        {"tp": 2, "sequence_parallel": False},
        sections={"memory": {"activation_checkpointing": "selective"}},
    ),
    Case("Ulysses", "decoder", 2, {"cp": 2}),
    Case("Ulysses, fewer key heads", "decoder", 4, {"cp": 4}),
    Case("Ulysses", "denoiser", 4, {"cp": 4}),
    Case("ring", "decoder", 2, {"cp": 2, "cp_kind": "ring"}),
    Case("ring, 45 tokens", "decoder", 4, {"cp": 4, "cp_kind": "ring"}, sections={"data": {"sequence_length": 45}}),
    Case("ring", "denoiser", 2, {"cp": 2, "cp_kind": "ring"}),
    Case("ring of Ulysses", "decoder", 4, {"cp": 4, "cp_kind": "both", "cp_ulysses": 2}),
    Case("pipeline, 1F1B", "decoder", 2, {"pp": 2}, 4),
    Case("pipeline, 1F1B", "denoiser", 2, {"pp": 2}, 4),
    Case("pipeline, interleaved", "decoder", 2, {"pp": 2, "pp_schedule": "interleaved_1f1b"}, 4),
    Case("pipeline, ZBV", "decoder", 2, {"pp": 2, "pp_schedule": "zbv"}, 4),
    Case(
        "pipeline, tied embedding",
        "decoder",
        2,
        {"pp": 2},
        4,
        {"model": {"config": recipes.DECODER | {"tie_word_embeddings": True}}},
    ),
    Case("experts", "experts", 2, {"ep": 2}),
    Case("experts", "experts", 4, {"ep": 4}),
    Case("tensor parallel x FSDP", "decoder", 4, {"tp": 2}),
    Case("tensor parallel x Ulysses", "decoder", 4, {"tp": 2, "cp": 2}),
    Case("pipeline x FSDP", "decoder", 4, {"pp": 2}, 4),
    Case("pipeline x tensor parallel", "decoder", 4, {"pp": 2, "tp": 2}, 4),
]


@dataclass(frozen=True)
class Setting:
    """A case on one rank, in the terms of the formulas."""

    recipe: Recipe
    own: Observation
    all: Sequence[Observation]

    @property
    def micro_batches(self) -> int:
        """Of this rank and step."""
        run = self.recipe.run
        return run.global_batch // run.micro_batch // self.own.sizes.data

    @property
    def element(self) -> int:
        """Bytes in the compute dtype."""
        return getattr(torch, self.recipe.precision.compute).itemsize

    @property
    def sequence(self) -> bool:
        """Whether tokens are split over tp between blocks."""
        return self.own.sizes.tp > 1 and self.recipe.layout.sequence_parallel

    @property
    def stage(self) -> int:
        """This rank's place in the pipeline."""
        return self.own.rank // self.own.sizes.stage


def expected(recipe: Recipe, own: Observation, everyone: Sequence[Observation]) -> Traffic:
    """What a rank sends by the formulas."""
    setting = Setting(recipe, own, everyone)
    config = recipe.model.config
    experts = config.get("num_experts", 0)
    routed_layers = config["num_hidden_layers"] if experts else 0
    sums = formulas.trainer(ranks=len(everyone), routed_layers=routed_layers, experts=experts)
    model = denoiser if recipe.objective.kind == "flow_matching" else decoder
    return sums + data_parallel(setting) + model(setting)


def data_parallel(s: Setting) -> Traffic:
    """FSDP over dp_shard x cp, replicas over dp_replicate."""
    size, reduced = s.own.sizes, getattr(torch, s.recipe.precision.reduce).itemsize
    ranks = size.dp_shard * size.cp
    layout, blocks = s.recipe.layout, len(s.own.blocks)
    count = formulas.pipelined_gathers if size.pp > 1 else formulas.gathers
    of_freed, root_gathers = count(s.micro_batches, freed_after_forward=True)
    of_kept, _ = count(s.micro_batches, freed_after_forward=False)
    kept = blocks if layout.reshard_after_forward is False else min(blocks, layout.blocks_kept_gathered)
    sharded = formulas.fully_sharded(
        s.own.blocks,
        s.own.root,
        ranks=ranks,
        element=s.element,
        reduced_element=reduced,
        block_gathers=[of_freed] * (blocks - kept) + [of_kept] * kept,
        root_gathers=root_gathers,
    )
    units = [*s.own.blocks, s.own.root]
    return sharded + formulas.replicated(units, replicas=size.dp_replicate, ranks=ranks, reduced_element=reduced)


def decoder(s: Setting) -> Traffic:
    """A Qwen3, with or without experts."""
    size, config = s.own.sizes, s.recipe.model.config
    length, width, layers = s.recipe.data.sequence_length, config["hidden_size"], len(s.own.blocks)
    pieces = math.lcm(size.cp, 2 * size.cp_ring if size.cp_ring > 1 else 1)  # causal rings are cut into 2 n chunks
    tokens = -(-length // pieces) * pieces // size.cp
    experts = config.get("num_experts", 0)
    attention: dict[str, Any] = {
        "batch": MICRO_BATCH,
        "head_dim": config["head_dim"],
        "key_heads": max(1, config["num_key_value_heads"] // size.tp),
        "element": s.element,
        "layers": layers,
        "micro_batches": s.micro_batches,
    }
    parts = [
        formulas.ulysses(
            ranks=size.cp_ulysses, tokens=tokens, query_heads=config["num_attention_heads"] // size.tp, **attention
        ),
        formulas.ring(
            ranks=size.cp_ring,
            tokens=tokens * size.cp_ulysses,
            **attention | {"key_heads": math.lcm(attention["key_heads"], size.cp_ulysses) // size.cp_ulysses},
        ),
        decoder_tensor_parallel(s, MICRO_BATCH * tokens, width),
        formulas.pipeline(
            rank_of=s.own.rank_of_stage,
            rank=s.stage,
            activations=[MICRO_BATCH * tokens * width // (size.tp if s.sequence else 1)],
            element=s.element,
            micro_batches=s.micro_batches,
        ),
    ]
    if size.pp > 1 and config["tie_word_embeddings"]:
        last = s.own.rank_of_stage[-1]
        elements = config["vocab_size"] * width
        parts.append(formulas.tied_weight(owns=s.stage == 0, uses=s.stage == last, elements=elements, element=4))
    if experts:
        parts.append(decoder_experts(s, experts, width, layers))
    return together(parts)


def decoder_tensor_parallel(s: Setting, tokens: int, width: int) -> Traffic:
    """Two regions a block; the vocabulary; weights that all ranks hold whole."""
    size, config, layers = s.own.sizes, s.recipe.model.config, len(s.own.blocks)
    common: dict[str, Any] = {"activations": tokens * width, "element": s.element, "micro_batches": s.micro_batches}
    full = s.recipe.memory.activation_checkpointing == "full"
    head: Shape = (config["head_dim"],)
    whole: list[Shape] = [head, head] * layers
    if s.sequence:
        whole += [(width,), (width,)] * layers
    if config["num_key_value_heads"] < size.tp:
        whole += [(config["num_key_value_heads"] * config["head_dim"], width)] * (2 * layers)
    stages = s.own.rank_of_stage
    return together(
        [
            formulas.tensor_parallel_regions(
                2 * layers, tp=size.tp, sequence=s.sequence, recomputed=layers if full else 0, **common
            ),
            formulas.split_tokens(tp=size.tp, begins=stages[0] == s.stage, ends=stages[-1] == s.stage, **common)
            if s.sequence
            else Traffic(),
            formulas.vocabulary_parallel(
                tp=size.tp,
                tokens=tokens,
                embedding=s.stage == stages[0],
                head=s.stage == stages[-1],
                **common,
            ),
            formulas.partial_gradients(whole, tp=size.tp, element=s.element),
        ]
    )


def decoder_experts(s: Setting, experts: int, width: int, layers: int) -> Traffic:
    """Dispatch and combine, with the rows that the routers of all ranks asked for."""
    size = s.own.sizes
    here = s.own.rank % size.ep
    group = [other for other in s.all if other.rank // size.ep == s.own.rank // size.ep]
    return formulas.expert_parallel(
        ep=size.ep,
        experts=experts,
        rows_out=sum(rows for to, rows in s.own.rows.items() if to != here),
        rows_in=sum(other.rows[here] for other in group if other is not s.own),
        width=width,
        element=s.element,
        layers=layers,
        micro_batches=s.micro_batches,
    )


def denoiser(s: Setting) -> Traffic:
    """A Stable Diffusion 3: attention joins picture and caption, all else has them apart."""
    size, config = s.own.sizes, s.recipe.model.config
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    width, layers = heads * head_dim, len(s.own.blocks)
    picture, caption = (-(-n // size.cp) for n in (recipes.PICTURE_TOKENS, recipes.CAPTION_TOKENS))
    attention: dict[str, Any] = {
        "batch": MICRO_BATCH,
        "head_dim": head_dim,
        "key_heads": heads,
        "element": s.element,
        "layers": layers,
        "micro_batches": s.micro_batches,
    }
    patch = config["patch_size"] ** 2 * config["out_channels"]
    output = MICRO_BATCH * picture * size.cp_ulysses * patch
    once: dict[str, Any] = {"element": s.element, "micro_batches": s.micro_batches}
    return together(
        [
            formulas.ulysses(ranks=size.cp_ulysses, tokens=picture + caption, query_heads=heads, **attention),
            formulas.ring(
                ranks=size.cp_ring,
                tokens=(picture + caption) * size.cp_ulysses,
                **attention | {"key_heads": heads // size.cp_ulysses},
            ),
            formulas.gathered_output("cp_ulysses", ranks=size.cp_ulysses, elements=output, **once),
            formulas.gathered_output("cp_ring", ranks=size.cp_ring, elements=output * size.cp_ring, **once),
            denoiser_tensor_parallel(s, MICRO_BATCH * picture * width, MICRO_BATCH * caption * width, layers),
            formulas.pipeline(
                rank_of=s.own.rank_of_stage,
                rank=s.stage,
                activations=[MICRO_BATCH * picture * width, MICRO_BATCH * caption * width, MICRO_BATCH * width],
                **once,
            ),
        ]
    )


def denoiser_tensor_parallel(s: Setting, picture: int, caption: int, layers: int) -> Traffic:
    """Two regions a block for each stream; nothing of the caption leaves the last block."""
    tp = s.own.sizes.tp
    common: dict[str, Any] = {
        "tp": tp,
        "element": s.element,
        "micro_batches": s.micro_batches,
        "sequence": False,
    }
    caption_enters_last = all_reduce("tp", tp, caption * s.element) * s.micro_batches
    return together(
        [
            formulas.tensor_parallel_regions(2 * layers, activations=picture, **common),
            formulas.tensor_parallel_regions(2 * (layers - 1), activations=caption, **common),
            caption_enters_last,
        ]
    )
