"""Context parallelism: sequences, images and videos shared by several ranks (Ulysses, ring, both)."""

from headway.parallel.context_parallel.check import check_context_parallel
from headway.parallel.context_parallel.diffusion import apply_context_parallel_diffusion
from headway.parallel.context_parallel.language import SequenceSplit, apply_context_parallel_language
from headway.parallel.context_parallel.ring import RING_OPERATORS

__all__ = [
    "RING_OPERATORS",
    "SequenceSplit",
    "apply_context_parallel_diffusion",
    "apply_context_parallel_language",
    "check_context_parallel",
]
