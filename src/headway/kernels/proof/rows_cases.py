"""The sum of parts that kernels over rows share, as it is compiled."""

from headway.kernels.proof.machine_code import Compiled
from headway.kernels.rows_triton import COMBINED_CHUNKS, COMBINED_COLUMNS, combine_kernel


def sum_of_parts(name: str) -> Compiled:
    """Float32 parts summed into bfloat16."""
    return Compiled(
        name,
        combine_kernel,
        {"parts": "*fp32", "total": "*bf16"},
        {"chunks": "i32", "width": "i32"},
        {"CHUNKS": COMBINED_CHUNKS, "COLUMNS": COMBINED_COLUMNS},
        warps=4,
        odd=frozenset({"chunks"}),
        statistics=(0, 1),
    )
