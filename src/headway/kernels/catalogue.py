"""The fused operators by name. What proves an operator is in ``proof/``, and needs Triton; this does not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """A fused operator: ``headway.kernels.NAME``."""

    name: str
    computes: str
    proof: str
    """Module with ``CASES``, ``check(case, seed)`` and ``compiled()``."""


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator(
            "adaln",
            "h = x + gate·branch; LayerNorm or RMSNorm of h; · (1 + scale) + shift; each by sample, frame or token",
            "headway.kernels.proof.adaln_cases",
        ),
        Operator(
            "norm_rope",
            "RMSNorm of heads or across them, rotary embedding, two streams written into one sequence",
            "headway.kernels.proof.norm_rope_cases",
        ),
        Operator(
            "rms_norm",
            "h = x + branch; RMSNorm of h; · weight or · (1 + weight)",
            "headway.kernels.proof.rms_norm_cases",
        ),
        Operator(
            "glu",
            "silu(gate)·value or gelu(gate)·value, apart or packed in one tensor",
            "headway.kernels.proof.glu_cases",
        ),
        Operator(
            "adamw",
            "clip, AdamW, stochastic rounding of bfloat16 weights, averages: one pass over many tensors",
            "headway.kernels.proof.adamw_cases",
        ),
        Operator(
            "quantise",
            "float8 codes and scales by tensor, row, block of 1x128, 128x128 or 1x32 (e8m0), of x and its transpose",
            "headway.kernels.proof.quantise_cases",
        ),
    )
}
