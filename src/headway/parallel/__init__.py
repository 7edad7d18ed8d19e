"""Layouts: ranks, mesh, sharding, activation checkpointing, compilation, precision, what a rank trains."""

from headway.parallel.activation_checkpointing import KEPT_OPERATORS, checkpoint_activations
from headway.parallel.activation_offload import offload_activations
from headway.parallel.async_tensor_parallel import overlap_tensor_parallel
from headway.parallel.bfloat16_on_cpu import emulate_bfloat16_products, has_bfloat16_instructions
from headway.parallel.compile import compile_blocks
from headway.parallel.data_parallel import FullyShardedModel, LaidOut, LaidOutWhole, shard
from headway.parallel.float8 import check_divided, check_float8, lower_products
from headway.parallel.masters import Masters, clip_scale
from headway.parallel.mesh import Meshes
from headway.parallel.placement import Piece, holders, own_piece, pieces
from headway.parallel.ranks import Ranks, start_ranks
from headway.parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from headway.parallel.vocabulary_parallel import cross_entropy_sum

__all__ = [
    "KEPT_OPERATORS",
    "FullyShardedModel",
    "LaidOut",
    "LaidOutWhole",
    "Masters",
    "Meshes",
    "Piece",
    "Ranks",
    "apply_tensor_parallel",
    "check_divided",
    "check_float8",
    "check_tensor_parallel",
    "checkpoint_activations",
    "clip_scale",
    "compile_blocks",
    "cross_entropy_sum",
    "emulate_bfloat16_products",
    "has_bfloat16_instructions",
    "holders",
    "lower_products",
    "offload_activations",
    "overlap_tensor_parallel",
    "own_piece",
    "pieces",
    "shard",
    "start_ranks",
]
