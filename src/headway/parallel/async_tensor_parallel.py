"""Asynchronous tensor parallelism: the compiler cuts products up, so that they run beside the transfers around them."""

import torch
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh

from headway.errors import UserError


def overlap_tensor_parallel(mesh: DeviceMesh, device: torch.device) -> None:
    """Let blocks that are compiled from now on overlap the gathers and scatters of sequence parallelism over ``mesh``.

    Inductor makes one operator of an all-gather and the products that read it, and one of a product and the
    reduce-scatter of its result (Wang et al. 2023, ASPLOS, doi 10.1145/3567955.3567959). Their pieces travel through
    symmetric memory, which ranks of one NVLink domain have. Raises UserError on other devices than CUDA's.
    """
    if device.type != "cuda":
        raise UserError(
            f"layout.async_tensor_parallel moves pieces through the memory of CUDA devices, and the run is on "
            f'{device.type}: leave it out, or set run.device = "cuda"'
        )
    enable_in_compiler(mesh)


def enable_in_compiler(mesh: DeviceMesh) -> None:
    """Inductor's pass, for this process, and symmetric memory for the ranks of ``mesh``."""
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
