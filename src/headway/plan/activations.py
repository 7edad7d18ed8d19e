"""What a layer's forward pass leaves for its backward pass, in bytes per token of a device.

Counted tensor by tensor after Korthikanti et al. 2022 (section 4), for what runs today: TransformerEngine's fused
layers, eager PyTorch, compiled PyTorch. Flash attention leaves its output and a number a row; the score matrix is left
only by unfused attention.
"""

import numpy as np

from headway.plan.behaviour import Behaviour
from headway.plan.block_time import Settings
from headway.plan.layout import Column, Layouts
from headway.plan.shape import Attention, Block


def held_by_layer(hidden: int, block: Block, layouts: Layouts, settings: Settings, behaviour: Behaviour) -> Column:
    """Bytes that one layer leaves in one micro-batch, under the settings' recomputation of parts."""
    tokens = layouts.micro_batch * (settings.longest or settings.sequence) / layouts.cp
    spread = np.where(layouts.sequence_parallel > 0, layouts.tp, 1.0)
    return tokens * (
        _between(hidden, block, settings, behaviour) / spread
        + _attention(hidden, block, layouts, settings, behaviour)
        + _mlp(block, settings, behaviour) / layouts.tp
        + _routed(hidden, block, settings, behaviour) / layouts.tp
        + _mixer(block, settings) / layouts.tp
        + _scaled(hidden, block, settings) / layouts.tp
    )


def held_by_checkpoint(hidden: int, layouts: Layouts, settings: Settings) -> Column:
    """Bytes that a fully recomputed layer leaves: its input."""
    tokens = layouts.micro_batch * (settings.longest or settings.sequence) / layouts.cp
    return 2.0 * tokens * hidden / np.where(layouts.sequence_parallel > 0, layouts.tp, 1.0)


def _scaled(hidden: int, block: Block, settings: Settings) -> float:
    """Results of products that a trained vector scales."""
    if not settings.scaled_outputs:
        return 0.0
    return 2.0 * sum(matrix.columns for matrix in block.mixer_matrices(hidden) + block.mlp_matrices(hidden))


def kept_bytes(settings: Settings, behaviour: Behaviour) -> float:
    """Bytes of an element that a product keeps of its input."""
    if not behaviour.casts_are_kept:
        return 2.0
    return {"float8": 1.0, "float4": 0.5625}.get(settings.precision, 2.0)


def _halves(block: Block) -> int:
    halves = (1 if block.attention or block.state_space else 0) + (1 if block.mlp_width or block.experts else 0)
    return halves + (1 if block.attention and block.attention.cross_tokens else 0)


def _between(hidden: int, block: Block, settings: Settings, behaviour: Behaviour) -> float:
    """Inputs and outputs of norms, and what dropout and residuals keep."""
    halves = _halves(block)
    norm_input = 2.0 * hidden
    norm_output = 0.0 if "norm" in settings.recompute else kept_bytes(settings, behaviour) * hidden
    if settings.lora_rank and settings.lora_on == "queries":
        wide = 4.0 * hidden if settings.float32_norms else 0.0
        return halves * (norm_input + wide) + norm_output  # only the product with adapters keeps its input
    match behaviour.activations:
        case "transformer_engine":
            return halves * (norm_input + norm_output)
        case "megatron_2022":  # a dropout mask of one byte besides
            return halves * (norm_input + norm_output + hidden)
        case "compiled":
            if "half_products" in settings.recompute:
                return 2.0 * hidden
            return halves * (norm_input + norm_output)
        case "eager":  # norms in float32 keep their input and their result
            if "half_products" in settings.recompute:
                return 6.0 * hidden  # and the norms' results
            if block.modulation:  # modulated norms keep the normed input, scales applied; gates keep the outputs
                return halves * 4 * 2.0 * hidden
            return halves * (norm_input + 4.0 * hidden + norm_output)
    raise AssertionError(behaviour.activations)


def _attention(hidden: int, block: Block, layouts: Layouts, settings: Settings, behaviour: Behaviour) -> Column:
    nothing = np.zeros(len(layouts))
    if not block.attention:
        return nothing
    shape = block.attention
    queries = 2.0 * shape.heads * shape.head_size / layouts.tp
    values = 2.0 * shape.heads * shape.value_size / layouts.tp
    pair = 2.0 * np.maximum(1, shape.kv_heads / layouts.tp) * (shape.head_size + shape.value_size)
    found = queries + pair + values + 4.0 * shape.heads / layouts.tp
    if shape.kv_rank:
        low = 2.0 * (2 * shape.q_rank + 2 * shape.kv_rank + shape.rope_head_size)  # and their norms' results
        raised = 0.0 if "up_projection" in settings.recompute else 1.0
        found = raised * (queries + pair) + values + low
    if behaviour.attention and "unfused" in behaviour.attention.values() and "core_attention" not in settings.recompute:
        found = found + 5.0 * shape.heads * settings.sequence / layouts.tp  # softmax, its mask and its dropped result
    if "half_products" in settings.recompute:
        return 0.5 * (queries + pair) + values + 0.5 * 2.0 * hidden
    if behaviour.activations == "eager":
        found = found + queries + 0.5 * pair  # before and after the rotary embedding or norm
        if shape.kv_heads < shape.heads:
            found = found + 2 * values  # keys and values repeated for their heads
    return found + _cross(shape, layouts)


def _cross(shape: Attention, layouts: Layouts) -> Column:
    size = shape.heads * shape.head_size / layouts.tp
    return (4.0 * size if shape.cross_tokens else 0.0) * np.ones(len(layouts))


def _mlp(block: Block, settings: Settings, behaviour: Behaviour) -> float:
    width = block.mlp_width + (block.experts.shared_width if block.experts else 0)
    if not width or "mlp" in settings.recompute:
        return 0.0
    ins = (4.0 if block.gated else 2.0) * width
    out = 0.0 if "activation" in settings.recompute else kept_bytes(settings, behaviour) * width
    if "half_products" in settings.recompute:
        return 0.5 * ins
    if behaviour.activations == "eager" and block.gated:
        out = out + 2.0 * width  # the activation of the gate
    if settings.lora_rank and settings.lora_on == "queries":
        out = out - 2.0 * width  # a frozen product keeps no input
    return ins + out


def _routed(hidden: int, block: Block, settings: Settings, behaviour: Behaviour) -> float:
    if not block.experts:
        return 0.0
    experts = block.experts
    size = experts.latent or hidden
    router = 8.0 * experts.count
    if "experts" in settings.recompute:
        return router
    ins = (4.0 if block.gated else 2.0) * experts.width
    kept = kept_bytes(settings, behaviour)
    out = 0.0 if "activation" in settings.recompute else kept * experts.width
    permuted = kept * size + 2.0 * size  # what experts are given, and what they give before it is weighted
    return router + behaviour.expert_imbalance * experts.chosen * (permuted + ins + out)


def _mixer(block: Block, settings: Settings) -> float:
    if not block.state_space:
        return 0.0
    mixer = block.state_space
    return 2.0 * (mixer.columns() + 3 * mixer.inner)
