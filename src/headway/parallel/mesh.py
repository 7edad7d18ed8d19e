"""From the recipe's layout to a DeviceMesh."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.errors import UserError
from headway.recipe import LayoutRecipe


def data_parallel_sizes(layout: LayoutRecipe, world: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) over ``world`` ranks. Raises UserError when their product is not ``world``."""
    replicate = layout.dp_replicate
    if layout.dp_shard == "auto":
        if world % replicate:
            raise UserError(
                f"layout.dp_replicate = {replicate} does not divide the {world} ranks; "
                f"it can be {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
            )
        return replicate, world // replicate
    if replicate * layout.dp_shard != world:
        raise UserError(
            f"layout.dp_replicate x layout.dp_shard = {replicate} x {layout.dp_shard} = {replicate * layout.dp_shard}, "
            f"but the run has {world} ranks: start {replicate * layout.dp_shard} ranks, "
            f'or set layout.dp_shard = "auto"'
        )
    return replicate, layout.dp_shard


def build_mesh(layout: LayoutRecipe, world: int, device_type: str) -> DeviceMesh:
    """The mesh that parameters are sharded over: ("dp_shard",), or ("dp_replicate", "dp_shard") with replicas."""
    replicate, shard = data_parallel_sizes(layout, world)
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
