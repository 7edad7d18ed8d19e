"""Time of a training step: stages of a pipeline, their micro-batches, and what communication nothing hides.

``t = m·max(stage) + bubble + data-parallel rest + optimizer``, bubble ``(pp - 1)/virtual`` passes of the other stages
(Narayanan et al. 2021). A stage's micro-batch takes its device's work or its host's, whichever is longer.
"""

from dataclasses import dataclass

import numpy as np

from headway.cluster import Cluster
from headway.cost import UNALIGNED, Collective, Estimate, launch, matrix_product, memory_bound, slowed_by_communication
from headway.plan.behaviour import Behaviour
from headway.plan.block_time import BlockTime, Settings, block_time
from headway.plan.communication import BlockCommunication, block_communication
from headway.plan.layout import Column, Layouts, collective_in
from headway.plan.parts import Parts, exposed
from headway.plan.shape import Block, ModelShape

GROWTH_PER_DOUBLING = (0.008, 0.002, 0.02)
"""By how much a step grows with each doubling of the devices, with its range: stragglers and jitter of the network
(weak-scaling series of NVIDIA's recipes: about 5 % from 16 to 2,048 devices)."""
RELEASES = 0.08
"""Half of an 80 % range: what a step's time moves by between releases of one stack on the same machine (the median of
such moves is 5.7 %, which would be .108 were all of them of versions not known)."""
GROWS_FROM = 8.0


@dataclass(frozen=True)
class StepTime:
    """A step of each layout, in ns."""

    parts: Parts
    bubble: Column
    """Share of the step that a device waits for other pipeline stages, as in ``parts`` but of all kinds."""

    @property
    def time(self) -> Estimate:
        """The step with its range."""
        return self.parts.ranged()


@dataclass(frozen=True)
class _Pass:
    """A layer's forward and backward pass in one micro-batch, the host's and the device's time apart."""

    forward: Parts
    backward: Parts
    operators: Column
    waited: Column
    """Of the operators, those whose launch the device waits for."""

    def __add__(self, other: "_Pass") -> "_Pass":
        return _Pass(
            self.forward + other.forward,
            self.backward + other.backward,
            self.operators + other.operators,
            self.waited + other.waited,
        )

    def __mul__(self, count: float | Column) -> "_Pass":
        return _Pass(self.forward * count, self.backward * count, self.operators * count, self.waited * count)


def step_time(
    cluster: Cluster, shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> StepTime:
    """Time of a step. Raises UserError where the cluster knows no rate of the precision."""
    per_stage, first_or_last = _division(shape, layouts)
    stage = _stage(cluster, shape, layouts, settings, behaviour, per_stage)
    ends = _ends(cluster, shape, layouts, settings, behaviour) * float(shape.heads)
    if settings.data_parallel == "fsdp":
        stage = _gathered(cluster, shape, stage, layouts, settings, behaviour)
    longest = stage + ends * first_or_last
    micro = _with_host(cluster, longest, behaviour)
    sends = _pipeline_messages(cluster, shape, layouts, settings, behaviour)
    steady = (micro + sends) * layouts.micro_batches
    others = _with_host(cluster, stage, behaviour)
    ending = _with_host(cluster, ends, behaviour) * np.where(layouts.pp > 1, 1 / layouts.virtual, 0.0)
    bubble = (others + sends) * ((layouts.pp - 1) / layouts.virtual) + ending * (1 - first_or_last)
    body = steady + bubble
    rest = _data_parallel(cluster, shape, stage, layouts, settings, behaviour)
    rest = rest + _optimizer(cluster, shape, layouts, settings, behaviour)
    whole = body + rest
    doublings = np.maximum(0, np.log2(layouts.devices / GROWS_FROM))
    total = whole.total()
    growth = Estimate(*(rate * doublings * total for rate in GROWTH_PER_DOUBLING))
    release = Estimate(0 * total, -RELEASES * total, RELEASES * total)
    whole = whole + Parts({"scale": growth, "release": release})
    return StepTime(whole, np.asarray(bubble.total() / whole.total()))


def _stage(
    cluster: Cluster,
    shape: ModelShape,
    layouts: Layouts,
    settings: Settings,
    behaviour: Behaviour,
    per_stage: Column,
) -> _Pass:
    """``per_stage`` layers of the fullest stage: kinds as they alternate, first layers of another kind elsewhere."""
    passes = [_layer(cluster, shape.hidden, block, layouts, settings, behaviour) for block in shape.blocks]
    found = passes[0] * (stage_share(shape, 0, layouts) * per_stage)
    for number, one in enumerate(passes[1:], start=1):
        found = found + one * (stage_share(shape, number, layouts) * per_stage)
    return found


def stage_share(shape: ModelShape, number: int, layouts: Layouts) -> Column:
    """Share of block kind ``number`` among the layers of the fullest stage."""
    inner = [block for block in shape.blocks if not shape.is_first_kind(block)]
    own = shape.blocks[number]
    everywhere = own.count / shape.layers
    within = 0.0 if shape.is_first_kind(own) else own.count / sum(block.count for block in inner)
    fits = layouts.pp * sum(block.count for block in inner) >= shape.layers
    return np.where((layouts.pp > 1) & fits, within, everywhere)


def _layer(
    cluster: Cluster, hidden: int, block: Block, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> _Pass:
    compute = block_time(cluster, hidden, block, layouts, settings, behaviour)
    ahead, back = (
        block_communication(cluster, hidden, block, layouts, settings, behaviour, backward)
        for backward in (False, True)
    )
    forward = compute.forward + _exposed(ahead, compute, behaviour)
    backward = compute.backward + compute.recomputed + _exposed(back, compute, behaviour)
    again = settings.recompute_layers
    collectives = behaviour.operators_collective * (ahead.collectives * (1 + again) + back.collectives)
    operators = compute.operators_forward * (1 + again) + compute.operators_backward + collectives
    waited = compute.operators_waited + behaviour.host_exposed * (operators - compute.operators_waited)
    return _Pass(forward, backward + forward * again, operators, waited)


def _exposed(communication: BlockCommunication, compute: BlockTime, behaviour: Behaviour) -> Parts:
    """What of a layer's collectives nothing runs beside, and what the others cost the compute they run beside."""
    return Parts(
        {
            "tensor": communication.tensor * behaviour.tensor_exposed,
            "context": communication.context * behaviour.context_exposed,
            "expert": communication.expert * behaviour.expert_exposed,
        }
    )


def _division(shape: ModelShape, layouts: Layouts) -> tuple[Column, Column]:
    """Layers of the longest stage, and 1 where it is one that has an end of the model besides.

    Where layers do not divide by the stages, embedding and head stand in place of a layer each (Megatron's
    account_for_embedding_in_pipeline_split), so that inner stages are the longest.
    """
    even = shape.layers % layouts.pp == 0
    per_stage = np.where(even, shape.layers / layouts.pp, np.ceil((shape.layers + 2) / layouts.pp))
    return np.minimum(per_stage, shape.layers), np.where(even | (layouts.pp == 1), 1.0, 0.0)


def _ends(cluster: Cluster, shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour) -> _Pass:
    """Head and loss of a micro-batch (the longer end), and the embedding where one stage has both."""
    tokens = layouts.micro_batch * settings.sequence / layouts.cp
    nothing = Parts({"memory": Estimate.exactly(np.zeros(len(layouts)))})
    operators = np.full(len(layouts), 30.0 * (1 - behaviour.graphed))
    waited = behaviour.host_exposed * operators
    if not shape.vocabulary:
        return _Pass(nothing, nothing, operators, waited)
    columns = _head_columns(shape, layouts, behaviour)
    aligned = behaviour.pads_vocabulary or shape.vocabulary % 8 == 0
    whole = np.where((layouts.tp > 1) | aligned, 1.0, 1 / UNALIGNED)
    forward = matrix_product(cluster, tokens, columns, shape.hidden) * whole
    backward = matrix_product(cluster, tokens, shape.hidden, columns) * whole
    if not settings.lora_rank:
        gradient = matrix_product(cluster, columns, shape.hidden, tokens, output_bytes=behaviour.accumulates_in)
        backward = backward + gradient * whole
    loss = memory_bound(cluster, behaviour.cross_entropy_bytes * tokens * columns)
    embedding = memory_bound(cluster, 12.0 * tokens * shape.hidden)
    if not settings.lora_rank:  # the embedding's gradient is a dense matrix: zeroed, filled, added
        held = np.where(layouts.pp > 1, 0.0, 1.0) * behaviour.accumulates_in * columns * shape.hidden
        embedding = embedding + memory_bound(cluster, held)
    return _Pass(
        Parts({"matrix": forward, "memory": loss * 0.5}),
        Parts({"matrix": backward, "memory": loss * 0.5 + embedding}),
        operators,
        waited,
    )


def _head_columns(shape: ModelShape, layouts: Layouts, behaviour: Behaviour) -> Column:
    """Columns of a device's part of the head, filled up to whole tiles where more than one rank shares it."""
    each = shape.vocabulary / layouts.tp
    padded = np.ceil(each / 128) * 128
    return padded if behaviour.pads_vocabulary else np.where(layouts.tp > 1, padded, each)


def _with_host(cluster: Cluster, work: _Pass, behaviour: Behaviour) -> Parts:
    """A micro-batch's work; where the host takes longer, what it takes longer is the host's part."""
    device = work.forward + work.backward
    host = _host(cluster, work.operators, behaviour)
    always = _host(cluster, work.waited, behaviour)
    waited = exposed(host, device.end_by_end()).later(always)
    value = np.maximum(always.value, host.value - device.total())
    return device + Parts({"host": Estimate(value, np.minimum(waited.low, value), np.maximum(waited.high, value))})


def _host(cluster: Cluster, operators: Column, behaviour: Behaviour) -> Estimate:
    if behaviour.operator_us is None:
        return launch(cluster, operators)
    value, low, high = (1e3 * operators * microseconds for microseconds in behaviour.operator_us)
    return Estimate(value, low, high)


def _pipeline_messages(
    cluster: Cluster, shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> Parts:
    """Activations to the next stage and gradients back, for each chunk of a micro-batch."""
    tokens = layouts.micro_batch * settings.sequence / layouts.cp
    shared = behaviour.pipeline_scatters | (layouts.sequence_parallel > 0)
    size = 2.0 * shape.hidden * np.where(shared, tokens / layouts.tp, tokens)
    stride = layouts.devices / layouts.pp
    message = collective_in(cluster, "send_recv", size, layouts.pp, stride)
    return Parts({"pipeline": message * (2.0 * layouts.virtual * behaviour.pipeline_exposed)})


def parameters_of_device(shape: ModelShape, layouts: Layouts) -> tuple[Column, Column]:
    """Dense and expert parameters that a device computes with, of the stage with the most."""
    per_stage, _ = _division(shape, layouts)
    share = [per_stage * stage_share(shape, number, layouts) for number in range(len(shape.blocks))]
    blocks = list(zip(share, shape.blocks, strict=True))
    dense = sum((count * block.dense_parameters(shape.hidden) for count, block in blocks), start=np.zeros(len(layouts)))
    dense = dense + shape.other_parameters / layouts.pp
    routed = sum((count * block.expert_parameters(shape.hidden) for count, block in blocks), start=0.0 * dense)
    embedding = shape.embedding_parameters() * np.where(layouts.pp > 1, 0.5 if not shape.tied else 1.0, 1.0)
    return (dense + embedding) / layouts.tp, routed / (layouts.ep * layouts.etp)


def _trained(settings: Settings, shape: ModelShape) -> float:
    """Share of the parameters that are trained."""
    if not settings.lora_rank:
        return 1.0
    return min(1.0, adapter_parameters(shape, settings) / shape.parameters())


def adapter_parameters(shape: ModelShape, settings: Settings) -> float:
    """Parameters of low-rank adapters on the blocks' projections."""
    found = 0.0
    for block in shape.blocks:
        mixer = block.mixer_matrices(shape.hidden)
        chosen = {"all": mixer + block.mlp_matrices(shape.hidden), "attention": mixer, "queries": mixer[:1]}
        matrices = chosen[settings.lora_on]
        found += block.count * sum(settings.lora_rank * (matrix.columns + matrix.depth) for matrix in matrices)
    return found


def _gathered(
    cluster: Cluster,
    shape: ModelShape,
    stage: _Pass,
    layouts: Layouts,
    settings: Settings,
    behaviour: Behaviour,
) -> _Pass:
    """fsdp: each layer's parameters are gathered before its two passes, its gradients reduced after.

    A layer's traffic runs beside the layer before it: what is longer than that is exposed, in each direction.
    """
    dense, routed = parameters_of_device(shape, layouts)
    layers = shape.layers / layouts.pp
    stride = np.where(layouts.cp > 1, layouts.tp, layouts.tp)
    ranks, expert_ranks = layouts.sharing, layouts.expert_sharing
    trained = _trained(settings, shape)

    def traffic(kind: Collective, bytes_each: float) -> Estimate:
        time = collective_in(cluster, kind, bytes_each * dense / layers, ranks, stride)
        if np.any(routed):
            apart = stride * layouts.ep
            time = time + collective_in(
                cluster,
                kind,
                bytes_each * routed / layers,
                expert_ranks,
                apart,
            )
        return time

    gather = traffic("all_gather", behaviour.parameter_bytes)
    reduce = traffic("reduce_scatter", behaviour.gradient_bytes * trained)
    again = gather if behaviour.gathers_eagerly else gather * 0.0
    return _Pass(
        _beside(cluster, stage.forward, gather * layers, layers, behaviour),
        _beside(cluster, stage.backward, (again + reduce) * layers, layers, behaviour),
        stage.operators + 3 * behaviour.operators_collective * layers,
        stage.waited,
    )


def _beside(cluster: Cluster, compute: Parts, traffic: Estimate, layers: Column, behaviour: Behaviour) -> Parts:
    """Compute with communication beside it: slower where they overlap, and what is left over exposed."""
    whole = compute.end_by_end()
    center = Estimate(compute.total(), whole.low, whole.high)
    left = exposed(traffic, center * (1 - 1 / layers))
    hidden = Estimate(traffic.value - left.value, traffic.low, traffic.high).value
    if behaviour.overlap_slows:
        slowed = slowed_by_communication(cluster, center, np.maximum(0, hidden))
        left = Estimate(
            left.value + slowed.value - center.value,
            left.low + slowed.low - center.low,
            left.high + slowed.high - center.high,
        )
    return compute + Parts({"data": left})


def _data_parallel(
    cluster: Cluster,
    shape: ModelShape,
    stage: _Pass,
    layouts: Layouts,
    settings: Settings,
    behaviour: Behaviour,
) -> Parts:
    """ddp and distributed_optimizer: gradients are reduced once a step, parameters gathered where states are shared.

    Gradients can be reduced while the last micro-batch goes backward; with interleaving from when the first chunk has
    seen its last one, (virtual - 1) / virtual of the pipeline's depth earlier. Parameters likewise, ahead.
    """
    if settings.data_parallel == "fsdp":
        return Parts({})
    dense, routed = parameters_of_device(shape, layouts)
    trained = _trained(settings, shape)
    stride = layouts.tp

    def over(kind: Collective, bytes_each: float) -> Estimate:
        time = collective_in(cluster, kind, bytes_each * dense * trained, layouts.sharing, stride)
        if np.any(routed):
            apart = np.minimum(layouts.ep * layouts.etp, layouts.devices / layouts.pp)
            time = time + collective_in(
                cluster,
                kind,
                bytes_each * routed * trained,
                layouts.expert_sharing,
                apart,
            )
        return time

    if settings.data_parallel == "ddp":
        reduce, gather = over("all_reduce", behaviour.gradient_bytes), None
    else:
        reduce, gather = over("reduce_scatter", behaviour.gradient_bytes), over("all_gather", behaviour.parameter_bytes)
    if not behaviour.data_overlaps:
        return Parts({"data": reduce if gather is None else reduce + gather})
    window = np.maximum(0.9, layouts.pp * (1 - 1 / layouts.virtual))
    backward, forward = (
        Estimate(parts.total(), parts.end_by_end().low, parts.end_by_end().high) * window
        for parts in (stage.backward, stage.forward)
    )
    left = exposed(reduce, backward)
    if gather is not None:
        left = left + exposed(gather, forward)
    return Parts({"data": left})


def _optimizer(
    cluster: Cluster, shape: ModelShape, layouts: Layouts, settings: Settings, behaviour: Behaviour
) -> Parts:
    dense, routed = parameters_of_device(shape, layouts)
    shared = dense / layouts.sharing + routed / layouts.expert_sharing
    own = dense + routed if settings.data_parallel == "ddp" else shared
    moved = memory_bound(cluster, behaviour.optimizer_bytes * own * _trained(settings, shape), "optimizer")
    host = _host(cluster, np.full(len(layouts), behaviour.operators_step), behaviour)
    waited = exposed(host, moved)
    return Parts({"optimizer": moved + Estimate(waited.value, waited.low, waited.high)})
