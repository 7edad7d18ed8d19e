"""How a framework runs a step: its kernels, what it overlaps, what it keeps. Known frameworks: frameworks.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from headway.errors import UserError


@dataclass(frozen=True)
class Behaviour:
    """What distinguishes one framework's step from another's, for the same model and layout."""

    name: str
    attention: dict[str, str]
    """Attention kernel by accelerator generation (a key of the cluster's achieved.attention, or ``unfused``); others
    take the cluster's default."""
    skips_masked: bool = True
    """Whether attention leaves out tiles that a causal mask hides."""
    passes: float = 1.0
    """Traffic of the memory-bound operators over that of well fused ones."""
    cross_entropy_bytes: float = 14.0
    """Traffic per token and vocabulary entry, forward and backward."""
    cross_entropy_held: float = 4.0
    """Bytes that the loss holds at the peak per token and entry: 4 are float32 logits, worked on in place."""
    operators_forward: float = 25.0
    """Operators that the host launches for one layer's forward pass."""
    operators_backward: float = 45.0
    operators_expert_forward: float = 45.0
    """What a layer with experts launches besides: router, permutation, dispatch."""
    operators_expert_backward: float = 60.0
    operators_each_expert: float = 6.0
    """Launched for each local expert, forward and backward: its products one by one."""
    operators_each_expert_cast: float = 10.0
    """Besides, for its operands' casts to float8."""
    expert_host_exposed: float = 1.0
    """Share of that host time that the device waits for: the host reads how many tokens each expert got."""
    operators_step: float = 300.0
    """Launched once a step: gradient norm, optimizer, zeroing."""
    operator_us: tuple[float, float, float] | None = None
    """Host time of an operator, low and high; None: the cluster's."""
    operators_collective: float = 3.0
    """Operators' worth of host time of one collective: events, stream waits and the launch."""
    host_exposed: float = 0.0
    """Share of the host's time that the device waits for even where its own work is longer: launches that follow a
    wait for the device."""
    pads_vocabulary: bool = True
    """Whether the vocabulary is filled up so that its matrices' rows begin at aligned addresses."""
    graphed: float = 0.0
    """Share of a layer's operators that CUDA graphs replay."""
    tensor_exposed: float = 1.0
    """Share of tensor-parallel communication that nothing runs beside."""
    context_exposed: float = 0.3
    expert_exposed: float = 1.0
    pipeline_exposed: float = 1.0
    pipeline_scatters: bool = True
    """Whether each tensor-parallel rank sends its share of a message between stages (Narayanan et al. 2021)."""
    context_balanced: bool = True
    """Whether each context-parallel rank has early and late parts of a causal sequence (zigzag); else the last rank
    computes twice the mean, and all wait for it."""
    context_gathers: bool = False
    """Whether context parallelism gathers keys and values before attention, in place of sending them round."""
    expert_deduplicates: bool = True
    """Whether tokens are sent once to each rank (and over the network once to each node), however many of its experts
    they chose (DeepEP, HybridEP)."""
    expert_imbalance: float = 1.0
    """Load of the fullest expert-parallel rank over the mean."""
    data_overlaps: bool = True
    """Whether gradients are reduced during the last backward pass, and parameters gathered during the first forward."""
    overlap_slows: bool = True
    """Whether communication beside compute takes processors and memory from it."""
    gathers_each_micro_batch: bool = True
    """fsdp: whether parameters are gathered and gradients reduced in every micro-batch."""
    gradient_bytes: float = 4.0
    """Of a gradient element in its reduction."""
    parameter_bytes: float = 2.0
    """Of a parameter element where it is gathered."""
    held_weight_bytes: float = 2.0
    """Bytes held per parameter for compute (not shared by distributed optimizers)."""
    held_gradient_bytes: float = 4.0
    held_state_bytes: float = 12.0
    """Master weights and moments per parameter (shared by distributed optimizers)."""
    accumulates_in: float = 8.0
    """Bytes that a weight gradient's product writes: 8 reads and writes a float32 sum."""
    optimizer_bytes: float = 34.0
    """Traffic of a step per parameter: states, master, gradient, working copy; norm and scaling."""
    gathers_eagerly: bool = True
    """fsdp: whether a layer's gathered parameters are dropped after its forward pass."""
    activations: Literal["transformer_engine", "eager", "compiled", "megatron_2022"] = "transformer_engine"
    """Which tensors the backward pass is left (headway.plan.activations)."""
    adapter_bytes: float = 16.0
    """Held per parameter of a low-rank adapter: weight, gradient and two moments."""
    reserved_over_allocated: float = 1.0
    """Memory that the framework reports over what is allocated: 1 where it reports the allocated."""
    layer_at_work: float = 1.2
    """What a layer holds while it goes backward over what its forward pass leaves: gradients of activations besides."""
    quantise: str = "current"
    """Recipe of float8 products: current, delayed, mx, block, rowwise, fused."""
    quantise_float4: str = "nvfp4"
    casts_are_kept: bool = False
    """Whether the backward pass is left the cast inputs of products, in place of 16-bit ones."""
    recomputes_some_layers: bool = True
    """Whether activation checkpointing can be asked for a number of layers (Megatron's); else for all or none."""
    fsdp_keeps_gathered: bool = True
    """fsdp in a pipeline: whether gathered parameters and whole gradients stay over the micro-batches (FSDP 2)."""


def behaviour_named(name: str, **changes: Any) -> Behaviour:
    """A known framework's behaviour, with ``changes``. Raises UserError naming the known ones."""
    table = _table()
    if name not in table:
        raise UserError(f"framework {name!r} is not known (known: {', '.join(table)})")
    return Behaviour(name=name, **(_resolved(table, name) | changes))


def _resolved(table: dict[str, Any], name: str) -> dict[str, Any]:
    own = dict(table[name])
    base = own.pop("like", None)
    own.pop("source", None)
    if "operator_us" in own:
        own["operator_us"] = tuple(own["operator_us"])
    return (_resolved(table, base) if base else {}) | own


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("headway.plan").joinpath("frameworks.toml").read_text(encoding="utf-8"))
