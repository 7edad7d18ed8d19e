"""Peak memory of a device: weights, gradients, states, activations of the micro-batches in flight, the loss.

Two moments can hold the peak: the start of the last stage's backward pass, where logits are alive, and the first stage
of a pipeline, which keeps the most micro-batches. The larger one counts.
"""

from dataclasses import dataclass

import numpy as np

from headway.cost import Estimate
from headway.plan.activations import held_by_checkpoint, held_by_layer
from headway.plan.behaviour import Behaviour
from headway.plan.block_time import Settings
from headway.plan.layout import Column, Layouts
from headway.plan.shape import ModelShape
from headway.plan.step_time import adapter_parameters, parameters_of_device, stage_share

GIB = float(1 << 30)
STATIC_RANGE = 0.01
"""Of what is counted exactly: padding of buckets and shards."""
ACTIVATION_RANGE = 0.10
"""Of activations: tensors that a version of a framework keeps or drops (SimuMax counts within 0.5 % with a replay of
each kernel's workspace, Korthikanti's closed form within 7 %)."""
WORKSPACE_GB = (0.25, 0.1, 0.8)
"""Held by libraries: matrix products' workspaces, and what rounds a block up."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes allocated on the fullest device, and what they are."""

    weights: Column
    gradients: Column
    states: Column
    activations: Column
    loss: Column
    working: Column
    """A layer at work: gathered parameters, recomputed activations, dense gradients before they are added."""
    reserved_over_allocated: float = 1.0

    @property
    def peak(self) -> Estimate:
        """Bytes."""
        static = self.weights + self.gradients + self.states
        moving = self.activations + self.loss + self.working
        value = (static + moving) * self.reserved_over_allocated + 1e9 * WORKSPACE_GB[0]
        below = np.hypot(STATIC_RANGE * static, ACTIVATION_RANGE * moving) + 1e9 * (WORKSPACE_GB[0] - WORKSPACE_GB[1])
        above = np.hypot(STATIC_RANGE * static, ACTIVATION_RANGE * moving) + 1e9 * (WORKSPACE_GB[2] - WORKSPACE_GB[0])
        return Estimate(value, value - below, value + above)


def memory(shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour) -> Memory:
    """Peak memory of each layout."""
    dense, routed = parameters_of_device(shape, layouts)
    weights, gradients, states = _static(shape, dense, routed, layouts, settings, behaviour)
    layer = np.zeros(len(layouts))
    for number, block in enumerate(shape.blocks):
        own = held_by_layer(shape.hidden, block, layouts, settings, behaviour)
        layer = layer + stage_share(shape, number, layouts) * own
    kept = held_by_checkpoint(shape.hidden, layouts, settings)
    again = settings.recompute_layers
    per_layer = (1 - again) * layer + again * kept
    stage = shape.layers / layouts.pp
    in_flight = _in_flight(layouts)
    first, last = per_layer * stage * in_flight, per_layer * stage * np.where(layouts.pp > 1, 1.0, in_flight)
    loss = _loss(shape, layouts, settings, behaviour)
    at_work = layer * (behaviour.layer_at_work if again else 0.0)
    working = _working(shape, dense, routed, layouts, settings, behaviour)
    first_peak, last_peak = first + at_work, last + np.maximum(loss, at_work)
    few_experts = shape.is_first_kind(shape.blocks[0]) & (stage <= 2 * shape.blocks[0].count)
    is_first = (first_peak >= last_peak) & (layouts.pp > 1) & ~few_experts  # such a first stage has fewer parameters
    activations = np.where(is_first, first_peak, last + np.where(loss >= at_work, 0.0, at_work))
    alive = np.where(is_first | (loss < at_work), 0.0, loss)
    working = working + shape.frozen_bytes
    return Memory(weights, gradients, states, activations, alive, working, behaviour.reserved_over_allocated)


def _in_flight(layouts: Layouts) -> Column:
    """Micro-batches' worth of a stage's activations that the first stage keeps (Narayanan et al. 2021)."""
    most = layouts.pp * (1 + np.where(layouts.virtual > 1, (layouts.pp - 1) / (layouts.pp * layouts.virtual), 0.0))
    return np.minimum(most, np.maximum(1, layouts.micro_batches))


def _static(
    shape: ModelShape,
    dense: Column,
    routed: Column,
    layouts: Layouts,
    settings: Settings,
    behaviour: Behaviour,
) -> tuple[Column, Column, Column]:
    held = behaviour.held_weight_bytes if settings.weight_bytes is None else settings.weight_bytes
    if settings.lora_rank:
        adapters = adapter_parameters(shape, settings) / shape.parameters() * (dense + routed)
        shared = layouts.sharing if settings.data_parallel == "fsdp" else np.ones(len(layouts))
        weights = held * (dense + routed) / shared
        if settings.weight_bytes is not None:  # quantised, but for embedding and head
            weights = weights + (2.0 - held) * shape.embedding_parameters() / layouts.tp
        each = behaviour.adapter_bytes / 4  # weight, gradient, two moments
        return weights + each * adapters, each * adapters, 2 * each * adapters
    gradients = behaviour.held_gradient_bytes
    if settings.data_parallel == "ddp":
        return held * (dense + routed), gradients * (dense + routed), behaviour.held_state_bytes * (dense + routed)
    own = dense / layouts.sharing + routed / layouts.expert_sharing
    if settings.data_parallel == "fsdp":
        return 0.0 * own, gradients * own, behaviour.held_state_bytes * own
    return held * (dense + routed), gradients * (dense + routed), behaviour.held_state_bytes * own


def _loss(shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour) -> Column:
    tokens = layouts.micro_batch * (settings.longest or settings.sequence) / layouts.cp
    return behaviour.cross_entropy_held * tokens * shape.vocabulary / layouts.tp


def _working(
    shape: ModelShape,
    dense: Column,
    routed: Column,
    layouts: Layouts,
    settings: Settings,
    behaviour: Behaviour,
) -> Column:
    """Parameters gathered for two layers (fsdp), or a layer's weight gradients before they are added."""
    if settings.lora_rank and settings.data_parallel != "fsdp":
        return np.zeros(len(layouts))
    stage = shape.layers / layouts.pp
    ends = shape.vocabulary * shape.hidden / layouts.tp
    inner = np.maximum(dense - ends * np.where(layouts.pp > 1, 1.0, 1.0 if shape.tied else 2.0), 0.0)
    one = (inner + routed) / stage
    if settings.data_parallel == "fsdp":
        layer_by_layer = 2.0 * behaviour.parameter_bytes * one + behaviour.gradient_bytes * one + 4.0 * ends
        kept = (behaviour.parameter_bytes + behaviour.gradient_bytes) * (dense + routed)
        return np.where((layouts.pp > 1) & behaviour.fsdp_keeps_gathered, kept, layer_by_layer)
    inner_layer = inner / stage  # experts' gradients go straight into their sums
    return np.where(behaviour.accumulates_in > 4, 2.0, 0.0) * (inner_layer + ends)
