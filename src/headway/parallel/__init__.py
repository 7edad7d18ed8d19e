"""Layouts: ranks, mesh, sharding, activation checkpointing, compilation, precision, what a rank trains."""

from headway.parallel.activation_checkpointing import checkpoint_activations
from headway.parallel.bfloat16_on_cpu import emulate_bfloat16_products, has_bfloat16_instructions
from headway.parallel.compile import compile_blocks
from headway.parallel.data_parallel import FullyShardedModel, LaidOut, shard
from headway.parallel.masters import Masters
from headway.parallel.mesh import Meshes, Sizes, sizes
from headway.parallel.placement import Piece, holders, pieces
from headway.parallel.ranks import Ranks, start_ranks

__all__ = [
    "FullyShardedModel",
    "LaidOut",
    "Masters",
    "Meshes",
    "Piece",
    "Ranks",
    "Sizes",
    "checkpoint_activations",
    "compile_blocks",
    "emulate_bfloat16_products",
    "has_bfloat16_instructions",
    "holders",
    "pieces",
    "shard",
    "sizes",
    "start_ranks",
]
