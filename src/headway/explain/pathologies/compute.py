"""Kernels that should be others: unfused pointwise work, casts, attention by parts, float32 products, recomputation."""

import re
from collections.abc import Iterator

import numpy as np

from headway.explain.finding import CauseClass, Confidence, Evidence, Finding, Fix
from headway.explain.host import named
from headway.explain.pathologies.evidence import (
    between,
    evidence_of,
    is_worth,
    kernels_launched_during,
    less_device_time,
    operators,
    per_step,
    percent,
    spans_of,
)
from headway.explain.rank_view import RankView
from headway.timeline import MODULE_RANGE, Kind
from headway.timeline.intervals import Mask

_ATTENTION_BY_PARTS = re.compile(r"_scaled_dot_product_attention_math\b")
_CAST = re.compile(r"^aten::_to_copy$")
_COPY_KERNEL = re.compile(r"(direct|bfloat16|float8)_copy|CopyKernel|elementwise_kernel.*copy", re.I)
_POINTWISE = re.compile(
    r"elementwise_kernel|SubTensorOp|pointwise_kernel|tensor_kernel_scan|CatArrayBatchedCopy|softmax_warp|layer_norm"
    r"|rms_?norm|dropout_kernel|batched_transpose",
    re.I,
)
_FUSED = re.compile(r"triton_|multi_tensor_apply|fused", re.I)
_PRODUCT = re.compile(r"gemm|conv|cutlass|Cijk|winograd|dgrad|wgrad|fprop|flash|fmha|xmma|nvjet", re.I)
_FLOAT32_PRODUCT = re.compile(r"(?<![a-z0-9])([a-z]+_|sm\d+_)*sgemm|f32f32_f32f32_f32", re.I)
_TENSOR_CORES = re.compile(r"tf32|s1688|s16816|h16816|tensorop|bf16|fp16|hgemm", re.I)
_FORWARD_ONLY = re.compile(
    r"^aten::(linear|conv[123]d|layer_norm|rms_norm|group_norm|batch_norm|scaled_dot_product_attention|embedding)$"
)
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: |^CheckpointFunctionBackward$")
_RECOMPUTES = re.compile(r"torch/utils/checkpoint\.py\(\d+\): (recompute_fn|unpack_hook)")
_ENCODER = re.compile(
    r"\b(vae|autoencoder\w*|text_?encod\w*|encode_(prompt|images?|text|first_stage|latents?)|t5\w*|clip_?(text|vision)\w*"
    r"|image_?encod\w*)\b",
    re.I,
)
TENSOR_CORES_SINCE = 8
"""Compute capability from which float32 products can run on tensor cores as TF32."""


def find_compute(view: RankView) -> Iterator[Finding]:
    """Findings about the kernels of one rank."""
    yield from _attention_by_parts(view)
    yield from _float32_products(view)
    yield from _casts(view)
    yield from _pointwise(view)
    yield from _recomputation(view)
    yield from _inline_encoder(view)


def _attention_by_parts(view: RankView) -> Iterator[Finding]:
    calls = operators(view, _ATTENTION_BY_PARTS)
    if not calls.any():
        return
    kernels = kernels_launched_during(view, spans_of(view, calls))
    gain = between(view, less_device_time(view, kernels, 0.5), less_device_time(view, kernels, 0.75))
    if not is_worth(gain, view.window_us):
        return
    spent = spans_of(view, kernels).total_ns() / 1000
    yield Finding(
        id="attention-by-parts",
        title="Attention falls back to products and softmax",
        claim=(
            f"{int(calls.sum())} attentions run as separate products and softmax: {per_step(view, spent)} in the "
            "forward pass alone. A fused kernel takes a half to a quarter of it, and no memory for the scores."
        ),
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, calls, "fell back"), evidence_of(view, kernels, f"{spent / 1000:,.2f} ms")),
        recoverable=gain,
        fix=Fix(
            "Give the fused kernel what it takes: bfloat16 or float16, a head dimension up to 256, a causal flag "
            "instead of a dense mask; or FlexAttention for other masks.",
            {"precision.compute": "bfloat16"},
        ),
        verify="aten::_scaled_dot_product_flash_attention (or efficient, or cudnn) takes the calls' place.",
        falsified_by="torch.backends.cuda.can_use_flash_attention says no for a reason that can't be removed.",
    )


def _float32_products(view: RankView) -> Iterator[Finding]:
    capability = _compute_capability(view)
    if capability < TENSOR_CORES_SINCE:
        return
    kernels = named(view.timeline, _FLOAT32_PRODUCT, Kind.COMPUTE) & ~named(view.timeline, _TENSOR_CORES, Kind.COMPUTE)
    if not kernels.any():
        return
    gain = between(view, less_device_time(view, kernels, 0.5), less_device_time(view, kernels, 0.87))
    if not is_worth(gain, view.window_us):
        return
    spent = int(view.timeline.duration_ns[kernels].sum()) / 1000
    yield Finding(
        id="float32-products",
        title="Products run in full float32, beside the tensor cores",
        claim=(
            f"{int(kernels.sum())} products run on plain float32 units: {per_step(view, spent)}. The tensor cores of "
            "this device do TF32 at least 4 times and bfloat16 at least 8 times as fast."
        ),
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.HIGH,
        evidence=(evidence_of(view, kernels, f"{spent / 1000:,.2f} ms"),),
        recoverable=gain,
        fix=Fix(
            'torch.set_float32_matmul_precision("high"), or compute in bfloat16.', {"precision.compute": "bfloat16"}
        ),
        verify="The products' names hold tf32, s1688 or bf16, and their time falls.",
        falsified_by="The loss needs full float32 products.",
    )


def _compute_capability(view: RankView) -> int:
    devices = view.trace.facts.get("deviceProperties")
    if not isinstance(devices, list) or not devices or not isinstance(devices[0], dict):
        return 0
    name, major = devices[0].get("name"), devices[0].get("computeMajor")
    return major if isinstance(major, int) and "NVIDIA" in str(name) else 0


def _casts(view: RankView) -> Iterator[Finding]:
    calls = operators(view, _CAST)
    kernels = named(view.timeline, _COPY_KERNEL, Kind.COMPUTE)
    if calls.any():
        kernels &= kernels_launched_during(view, spans_of(view, calls))
    if not calls.any() or not kernels.any():
        return
    gain = between(view, less_device_time(view, kernels, 0.5), less_device_time(view, kernels, 1.0))
    if not is_worth(gain, view.window_us):
        return
    spent = int(view.timeline.duration_ns[kernels].sum()) / 1000
    yield Finding(
        id="dtype-casts",
        title="Tensors are cast to another type again and again",
        claim=f"{int(kernels.sum()) / view.step_count:,.0f} casts a step take {per_step(view, spent)} of the device.",
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.MEDIUM,
        evidence=(evidence_of(view, kernels, f"{spent / 1000:,.2f} ms"), evidence_of(view, calls, "the casts")),
        recoverable=gain,
        fix=Fix(
            "Keep parameters and activations in bfloat16 (fully_shard's mixed precision casts once a step, not once a "
            "call), and compile so that the remaining casts join their neighbours.",
            {"precision.compute": "bfloat16", "run.compile": True},
        ),
        verify="aten::_to_copy falls to a few per step.",
        falsified_by="The casts belong to a master copy that is cast once a step.",
    )


def _pointwise(view: RankView) -> Iterator[Finding]:
    kernels = named(view.timeline, _POINTWISE, Kind.COMPUTE) & ~named(view.timeline, _FUSED, Kind.COMPUTE)
    kernels &= ~named(view.timeline, _PRODUCT, Kind.COMPUTE)
    spent = int(view.timeline.duration_ns[kernels].sum()) / 1000
    share = spent / max(view.whole.compute_ns / 1000, 1e-9)
    if share < 0.3:
        return
    gain = between(view, less_device_time(view, kernels, 0.3), less_device_time(view, kernels, 0.7))
    if not is_worth(gain, view.window_us):
        return
    yield Finding(
        id="unfused-pointwise",
        title="Norms and pointwise operators run one by one",
        claim=(
            f"{int(kernels.sum()) / view.step_count:,.0f} kernels a step that only move memory take {percent(share)} "
            f"of compute ({per_step(view, spent)}); fused they read and write once what they now do several times."
        ),
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.MEDIUM,
        evidence=(evidence_of(view, kernels, f"{spent / 1000:,.2f} ms"),),
        recoverable=gain,
        fix=Fix(
            "Compile the blocks, or use fused norms, activations, rotary embeddings and losses.", {"run.compile": True}
        ),
        verify="Their number falls, and triton_ kernels take their place.",
        falsified_by="Their achieved bandwidth times the fused traffic says that fusing saves nothing.",
    )


def _recomputation(view: RankView) -> Iterator[Finding]:
    again = operators(view, _FORWARD_ONLY)
    backward = spans_of(view, operators(view, _BACKWARD))
    again &= backward.contains(view.timeline.start_ns)
    marked = named(view.timeline, _RECOMPUTES, Kind.OPERATOR, Kind.PYTHON)
    during = spans_of(view, again) | (spans_of(view, marked) if marked.any() else spans_of(view, again))
    kernels = kernels_launched_during(view, during) & view.timeline.kinds(Kind.COMPUTE)
    if not kernels.any():
        return
    gain = between(view, less_device_time(view, kernels, 0.5), less_device_time(view, kernels, 1.0))
    if not is_worth(gain, view.window_us):
        return
    spent = spans_of(view, kernels).total_ns() / 1000
    share = spent / max(view.whole.compute_ns / 1000, 1e-9)
    evidence: list[Evidence] = [evidence_of(view, kernels, f"{spent / 1000:,.2f} ms launched by recomputation")]
    if again.any():
        evidence.append(evidence_of(view, again, "forward operators within the backward pass"))
    yield Finding(
        id="recomputation",
        title="Activation checkpointing computes the forward pass again",
        claim=f"{percent(share)} of compute ({per_step(view, spent)}) is forward work that backward repeats.",
        cause_class=CauseClass.MEMORY,
        confidence=Confidence.HIGH if marked.any() else Confidence.MEDIUM,
        evidence=tuple(evidence),
        recoverable=gain,
        fix=Fix(
            "If memory allows, keep what is dear to compute (selective checkpointing), or checkpoint fewer blocks.",
            {"memory.activation_checkpointing": "selective"},
        ),
        verify="Forward operators within backward become fewer while peak memory stays below the device's.",
        falsified_by="Without checkpointing the step does not fit.",
    )


def _is_trained(view: RankView, scopes: Mask) -> bool:
    """Whether a backward pass goes through the modules of the scopes, as far as the trace tells modules."""
    timeline = view.timeline
    paths = tuple(
        timeline.strings[name].removeprefix(MODULE_RANGE)
        for name in np.unique(timeline.name[scopes]).tolist()
        if timeline.strings[name].startswith(MODULE_RANGE)
    )
    backward = timeline.module[timeline.matching("phase", ["backward"])]
    return bool(paths) and any(timeline.strings[module].startswith(paths) for module in np.unique(backward).tolist())


def _inline_encoder(view: RankView) -> Iterator[Finding]:
    scopes = named(view.timeline, _ENCODER, Kind.ANNOTATION, Kind.PYTHON)
    if not scopes.any() or _is_trained(view, scopes):
        return
    kernels = kernels_launched_during(view, spans_of(view, scopes))
    if not kernels.any():
        return
    gain = between(view, less_device_time(view, kernels, 0.5), less_device_time(view, kernels, 1.0))
    spent = spans_of(view, kernels).total_ns() / 1000
    if not is_worth(gain, view.window_us) or spent < 0.03 * view.window_us:
        return
    yield Finding(
        id="inline-encoder",
        title="Frozen encoders run inside the step",
        claim=(
            f"Encoders take {per_step(view, spent)} ({percent(spent / view.window_us)} of the window); what they give "
            "for a sample is the same in every epoch."
        ),
        cause_class=CauseClass.COMPUTE,
        confidence=Confidence.MEDIUM,
        evidence=(
            evidence_of(view, scopes, "scopes of encoders"),
            evidence_of(view, kernels, f"{spent / 1000:,.2f} ms of kernels launched in them"),
        ),
        recoverable=gain,
        fix=Fix("Encode once and cache latents and embeddings, or encode on other devices; compile what remains."),
        verify="The scopes are gone from the step, and it is shorter by their time.",
        falsified_by="The encoders are trained, or every sample is augmented anew before them.",
    )
