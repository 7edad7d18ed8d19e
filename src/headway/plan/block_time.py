"""What one block costs a device: forward and backward, by part, for a column of layouts.

Products, attention and memory-bound operators come from the cost room; this file says which of them a block has and of
what size. Backward: a product's two gradients have its three sizes in turn; attention computes its scores again.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headway.cluster import Cluster
from headway.cost import (
    CAST_BYTES,
    Estimate,
    attention,
    grouped_matrix_product,
    matrix_product,
    memory_bound,
    quantise,
    unfused_attention,
)
from headway.plan.behaviour import Behaviour
from headway.plan.layout import Column, DataParallel, Layouts
from headway.plan.parts import Parts
from headway.plan.shape import Block, Matrix

Recomputed = Literal["core_attention", "mlp", "norm", "activation", "experts", "up_projection", "half_products"]
WEIGHT_GRADIENT = 1.05
"""Time of a weight gradient's product over the forward one's, besides its shape (SimuMax, B200 and A100)."""


@dataclass(frozen=True)
class Settings:
    """What of a run is the same for all layouts of a column."""

    sequence: int
    precision: Literal["bfloat16", "float16", "float8", "float4"] = "bfloat16"
    """Of the blocks' matrix products; embedding, head and attention stay in 16 bits."""
    data_parallel: DataParallel = "distributed_optimizer"
    recompute_layers: float = 0.0
    """Share of the layers whose forward pass runs again in the backward pass."""
    recompute: frozenset[Recomputed] = field(default_factory=frozenset)
    """Parts of every layer that run again."""
    lora_rank: int = 0
    """0: all weights are trained; else the rank of adapters, and the model's own weights are frozen."""
    lora_on: Literal["all", "attention", "queries"] = "all"
    """Which projections have adapters: all, attention's, or its first one (queries, keys and values)."""
    scaled_outputs: bool = False
    """Whether each product's result is scaled by a trained vector, and so kept (adapters of LLaMA-Adapter V2)."""
    float32_norms: bool = True
    """Whether eager norms compute in float32 single operators (RMS norms), in place of one kernel (layer norms)."""
    weight_bytes: float | None = None
    """Of a frozen weight; None: as the behaviour holds them."""
    longest: int = 0
    """Tokens of the longest sample, where samples differ (memory); 0: ``sequence``."""


@dataclass(frozen=True)
class BlockTime:
    """One layer of a micro-batch on one device."""

    forward: Parts
    backward: Parts
    recomputed: Parts
    """What runs again under the settings' recomputation of parts."""
    operators_forward: Column
    operators_backward: Column
    operators_waited: Column
    """Of those of both passes, the ones whose launch the device waits for."""


@dataclass(frozen=True)
class _Product:
    matrix: Matrix
    rows: Column
    columns: Column
    depth: Column
    groups: Column | None = None


def block_time(
    cluster: Cluster, hidden: int, block: Block, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> BlockTime:
    """Time of one layer of ``block``, in its parts, communication left out."""
    tokens = layouts.micro_batch * settings.sequence / layouts.cp
    split = np.where(layouts.sequence_parallel > 0, tokens / layouts.tp, tokens)
    mixer = [_product(matrix, tokens, split, layouts) for matrix in block.mixer_matrices(hidden)]
    dense = [_product(matrix, tokens, split, layouts) for matrix in block.mlp_matrices(hidden)]
    routed = _expert_products(hidden, block, tokens, layouts)
    core_forward, core_backward = _mixing(cluster, block, layouts, settings, behaviour)
    moved = Traffic.of(hidden, block, tokens, split, layouts)
    forward = _products_forward(cluster, mixer + dense + routed, settings, behaviour) + core_forward
    backward = _products_backward(cluster, mixer + dense + routed, settings, behaviour) + core_backward
    forward = forward + moved.forward(cluster, behaviour)
    backward = backward + moved.backward(cluster, behaviour)
    again = Parts({})
    if "core_attention" in settings.recompute:
        again = again + core_forward
    if "mlp" in settings.recompute:
        again = again + _products_forward(cluster, dense, settings, behaviour) + moved.activation_forward(cluster)
    if "experts" in settings.recompute:
        again = again + _products_forward(cluster, dense + routed, settings, behaviour)
        again = again + moved.activation_forward(cluster)
    if "up_projection" in settings.recompute and block.attention and block.attention.kv_rank:
        raised = [product for product in mixer if product.matrix.split == "columns"]
        again = again + _products_forward(cluster, raised, settings, behaviour)
    if "half_products" in settings.recompute:  # torchtitan's selective checkpointing keeps every other product
        again = again + (_products_forward(cluster, mixer + dense, settings, behaviour) * 0.5)
        again = again + moved.forward(cluster, behaviour)
    if settings.recompute & {"activation", "norm"}:
        again = again + moved.activation_forward(cluster)
    return BlockTime(forward, backward, again, *_operators(block, layouts, settings, behaviour))


def _operators(
    block: Block, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> tuple[Column, Column, Column]:
    """What the host launches for a layer, forward and backward, and what of it the device waits for."""
    has_both = 1.0 if block.attention and (block.mlp_width or block.experts) else 0.6
    forward = np.full(len(layouts), has_both * behaviour.operators_forward)
    backward = np.full(len(layouts), has_both * behaviour.operators_backward)
    waited: Column = np.zeros(len(layouts))
    if block.experts:
        casts = behaviour.operators_each_expert_cast if settings.precision in ("float8", "float4") else 0.0
        each = (behaviour.operators_each_expert + casts) * np.maximum(1, block.experts.count / layouts.ep)
        forward = forward + behaviour.operators_expert_forward + each / 3
        backward = backward + behaviour.operators_expert_backward + each * 2 / 3
        waited = behaviour.operators_expert_forward + behaviour.operators_expert_backward + each
    alive = 1 - behaviour.graphed
    return alive * forward, alive * backward, alive * behaviour.expert_host_exposed * waited


def _product(matrix: Matrix, tokens: Column, split: Column, layouts: Layouts) -> _Product:
    columns = matrix.columns / layouts.tp if matrix.split == "columns" else matrix.columns + 0 * tokens
    depth = matrix.depth / layouts.tp if matrix.split == "depth" else matrix.depth + 0 * tokens
    return _Product(matrix, split if matrix.split == "whole" else tokens, columns, depth)


def _expert_products(hidden: int, block: Block, tokens: Column, layouts: Layouts) -> list[_Product]:
    """The routed experts' products of a device, loads being equal: each expert-parallel rank gets what it gives."""
    if not block.experts:
        return []
    experts, size = block.experts, block.experts.latent or hidden
    local = np.maximum(1, experts.count / layouts.ep)
    arriving = tokens * experts.chosen * layouts.etp / layouts.tp  # tokens of a tensor-parallel group are shared out
    rows = arriving / local
    width = experts.width / layouts.etp
    up = Matrix((2 if block.gated else 1) * experts.width, size, "columns")
    down = Matrix(size, experts.width, "depth")
    return [
        _Product(up, rows, (2 if block.gated else 1) * width, size + 0 * width, local),
        _Product(down, rows, size + 0 * width, width, local),
    ]


def _products_forward(cluster: Cluster, products: list[_Product], settings: Settings, behaviour: Behaviour) -> Parts:
    matrix, casts = Estimate.exactly(0.0), Estimate.exactly(0.0)
    for product in products:
        matrix = matrix + _time(cluster, settings, product.rows, product.columns, product.depth, product.groups)
        casts = casts + _cast(cluster, settings, behaviour, _elements(product, product.depth))
    return Parts({"matrix": matrix, "memory": casts})


def _products_backward(cluster: Cluster, products: list[_Product], settings: Settings, behaviour: Behaviour) -> Parts:
    matrix, casts = Estimate.exactly(0.0), Estimate.exactly(0.0)
    for product in products:
        rows, columns, depth, groups = product.rows, product.columns, product.depth, product.groups
        matrix = matrix + _time(cluster, settings, rows, depth, columns, groups)
        if not settings.lora_rank:
            written = behaviour.accumulates_in
            matrix = matrix + _weight_gradient(cluster, settings, columns, depth, rows, groups, written)
        casts = casts + _cast(cluster, settings, behaviour, _elements(product, columns))
    return Parts({"matrix": matrix, "memory": casts})


def _elements(product: _Product, width: Column) -> Column:
    return product.rows * width * (1.0 if product.groups is None else product.groups)


def _time(
    cluster: Cluster, settings: Settings, rows: Column, columns: Column, depth: Column, groups: Column | None
) -> Estimate:
    if groups is None:
        return matrix_product(cluster, rows, columns, depth, settings.precision)
    return grouped_matrix_product(cluster, rows, columns, depth, groups, settings.precision)


def _weight_gradient(
    cluster: Cluster,
    settings: Settings,
    columns: Column,
    depth: Column,
    rows: Column,
    groups: Column | None,
    output_bytes: float,
) -> Estimate:
    if groups is None:
        time = matrix_product(cluster, columns, depth, rows, settings.precision, output_bytes=output_bytes)
    else:  # few rows a group are here a small depth: the same loss
        time = grouped_matrix_product(cluster, rows, columns, depth, groups, settings.precision)
        written = output_bytes * columns * depth * groups
        time = time.later(memory_bound(cluster, written))
    return time * WEIGHT_GRADIENT


def _cast(cluster: Cluster, settings: Settings, behaviour: Behaviour, elements: Column) -> Estimate:
    if settings.precision not in ("float8", "float4"):
        return Estimate.exactly(0.0)
    recipe = behaviour.quantise_float4 if settings.precision == "float4" else behaviour.quantise
    assert recipe in CAST_BYTES
    return quantise(cluster, elements, recipe)  # type: ignore[arg-type]


def _mixing(
    cluster: Cluster, block: Block, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> tuple[Parts, Parts]:
    """Attention's scores and sums, or the scan of a state space: forward and backward."""
    if block.state_space:
        return _scan(cluster, block, layouts, settings)
    if not block.attention:
        return Parts({}), Parts({})
    shape = block.attention
    kernel = behaviour.attention.get(cluster.accelerator.generation)
    heads = np.maximum(1, shape.heads / layouts.tp)
    keys = float(settings.sequence)
    causal, queries = shape.causal, keys
    if shape.window and shape.window < keys:
        causal, keys = False, float(shape.window)
    share = 1 / layouts.cp
    if causal and not behaviour.context_balanced:
        share = share * (2 - 1 / layouts.cp)
    times = []
    for backward in (False, True):
        if kernel == "unfused":
            time = unfused_attention(
                cluster, layouts.micro_batch, heads, queries, keys, shape.head_size, backward=backward
            )
        else:
            time = attention(
                cluster, layouts.micro_batch, heads, queries, keys, shape.head_size,
                causal=causal, skips_masked=behaviour.skips_masked, backward=backward, kernel=kernel,
                value_head_size=shape.value_size,
            )  # fmt: skip
        time = time * share
        if shape.cross_tokens:
            time = time + attention(
                cluster, layouts.micro_batch, heads, queries * share, shape.cross_tokens, shape.head_size,
                backward=backward, kernel=None if kernel == "unfused" else kernel,
            )  # fmt: skip
        times.append(Parts({"attention": time}))
    return times[0], times[1]


SCAN_BYTES = {False: 40.0, True: 100.0}
"""Traffic of Mamba-2 per inner channel and token: convolution 6, chunk states 4, scan 8, gated norm 6, and float32
states between chunks (128 of them a channel for every 128 tokens) written and read twice, 16; backwards 2.5 times."""


def _scan(cluster: Cluster, block: Block, layouts: Layouts, settings: Settings) -> tuple[Parts, Parts]:
    assert block.state_space
    tokens = layouts.micro_batch * settings.sequence / layouts.cp
    inner = block.state_space.inner / layouts.tp
    forward, backward = (
        memory_bound(cluster, SCAN_BYTES[way] * tokens * inner, "normalisation") for way in (False, True)
    )
    return Parts({"attention": forward}), Parts({"attention": backward})


@dataclass(frozen=True)
class Traffic:
    """Bytes of a block's memory-bound operators, well fused, forward; backward passes move a half to the whole more."""

    norm: Column
    residual: Column
    activation: Column
    rope: Column
    permute: Column

    @staticmethod
    def of(hidden: int, block: Block, tokens: Column, split: Column, layouts: Layouts) -> "Traffic":
        """``split``: tokens of a device between the products (sequence parallelism)."""
        norms = (1 if block.attention or block.state_space else 0) + (1 if block.mlp_width or block.experts else 0)
        norms += 1 if block.attention and block.attention.cross_tokens else 0
        width = block.mlp_width + (block.experts.shared_width if block.experts else 0)
        ways = 6.0 if block.gated else 4.0
        activation = ways * tokens * width / layouts.tp
        rope = 0 * tokens
        if block.attention and block.attention.rotary:
            sizes = block.attention.heads * block.attention.head_size
            sizes += block.attention.kv_heads * block.attention.head_size
            rope = 4.0 * tokens * sizes / layouts.tp
        permute = 0 * tokens
        if block.experts:
            arriving = tokens * block.experts.chosen / layouts.tp
            activation = activation + ways * arriving * layouts.etp * block.experts.width / layouts.etp
            permute = 8.0 * arriving * (block.experts.latent or hidden)
        return Traffic(4.0 * norms * split * hidden, 6.0 * norms * split * hidden, activation, rope, permute)

    def forward(self, cluster: Cluster, behaviour: Behaviour) -> Parts:
        """Time of the forward pass's memory-bound operators."""
        time = memory_bound(cluster, self.norm, "normalisation")
        time = time + memory_bound(cluster, self.residual + self.activation + self.rope) * behaviour.passes
        if np.any(self.permute):
            time = time + memory_bound(cluster, self.permute, "permute")
        return Parts({"memory": time})

    def backward(self, cluster: Cluster, behaviour: Behaviour) -> Parts:
        """Time of the backward pass's: gradients of inputs besides."""
        time = memory_bound(cluster, 1.5 * self.norm, "normalisation")
        moved = self.residual + 1.67 * self.activation + self.rope
        time = time + memory_bound(cluster, moved) * behaviour.passes
        if np.any(self.permute):
            time = time + memory_bound(cluster, self.permute, "permute")
        return Parts({"memory": time})

    def activation_forward(self, cluster: Cluster) -> Parts:
        """Time of the activation function alone."""
        return Parts({"memory": memory_bound(cluster, self.activation)})
