"""Fused operators: each a reference in plain PyTorch, and a GPU kernel that is proven without a GPU."""

from headway.kernels.adaln import adaln
from headway.kernels.adamw import Average, Rounding, adamw_
from headway.kernels.catalogue import OPERATORS, Operator
from headway.kernels.glu import glu, glu_packed
from headway.kernels.norm_rope import norm_rope
from headway.kernels.quantise import quantise, quantise_both
from headway.kernels.quantise_reference import Quantised
from headway.kernels.rms_norm import rms_norm
from headway.kernels.stochastic_rounding import Place, key_of, place_of

__all__ = [
    "OPERATORS",
    "Average",
    "Operator",
    "Place",
    "Quantised",
    "Rounding",
    "adaln",
    "adamw_",
    "glu",
    "glu_packed",
    "key_of",
    "norm_rope",
    "place_of",
    "quantise",
    "quantise_both",
    "rms_norm",
]
