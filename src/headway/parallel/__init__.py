"""Layouts: ranks, mesh, sharding, activation checkpointing, compilation, precision, gradient norm."""

from headway.parallel.activation_checkpointing import checkpoint_activations
from headway.parallel.bfloat16_on_cpu import emulate_bfloat16_products, has_bfloat16_instructions
from headway.parallel.compile import compile_blocks
from headway.parallel.data_parallel import backward, reduce_gradients, shard
from headway.parallel.gradient_norm import clip_gradients, squared_norm_share
from headway.parallel.mesh import build_mesh, data_parallel_sizes
from headway.parallel.one_device import held_whole
from headway.parallel.ranks import Ranks, start_ranks

__all__ = [
    "Ranks",
    "backward",
    "build_mesh",
    "checkpoint_activations",
    "clip_gradients",
    "compile_blocks",
    "data_parallel_sizes",
    "emulate_bfloat16_products",
    "has_bfloat16_instructions",
    "held_whole",
    "reduce_gradients",
    "shard",
    "squared_norm_share",
    "start_ranks",
]
