"""From the recipe's layout to the device meshes of its axes."""

from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.recipe import LayoutRecipe, sizes


class Meshes:
    """This rank among the others, in each axis of a layout. Every rank must make it, for it makes process groups.

    Ranks are numbered with stages outermost, then replicas, shards, context and tensor parallelism.
    """

    def __init__(self, layout: LayoutRecipe, rank: int, world: int, device_type: str) -> None:
        self.sizes = sizes(layout, world)
        self.rank = rank
        self.world = world
        size = self.sizes
        self._parameters = init_device_mesh(
            device_type,
            (size.pp, size.dp_replicate, size.dp_shard * size.cp, size.tp),
            mesh_dim_names=("pp", "dp_replicate", "shard", "tp"),
        )
        self.pp = self._parameters["pp"]
        self.tp = self._parameters["tp"]
        # Ranks that share a sequence share the parameters too: each has a part of their gradients.
        self.fsdp = self._parameters["shard" if size.dp_replicate == 1 else ("dp_replicate", "shard")]
        """What parameters are sharded over: ("shard",), or ("dp_replicate", "shard") with replicas."""
        self._device_type = device_type

    @cached_property
    def cp(self) -> DeviceMesh:
        """Ranks of one sequence: ("cp_ring", "cp_ulysses")."""
        size = self.sizes
        activations = init_device_mesh(
            self._device_type,
            (size.pp * size.data, size.cp_ring, size.cp_ulysses, size.tp),
            mesh_dim_names=("data", "cp_ring", "cp_ulysses", "tp"),
        )
        return activations["cp_ring", "cp_ulysses"]

    @cached_property
    def expert(self) -> DeviceMesh:
        """Ranks of one stage as the experts see them: ("dp_replicate", "expert_shard", "ep")."""
        size = self.sizes
        experts = init_device_mesh(
            self._device_type,
            (size.pp, size.dp_replicate, size.dp_shard * size.cp * size.tp // size.ep, size.ep),
            mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"),
        )
        return experts["dp_replicate", "expert_shard", "ep"]

    @property
    def stage(self) -> int:
        """This rank's place among the pipeline's."""
        return self.rank // self.sizes.stage

    @property
    def context_rank(self) -> int:
        """This rank's place among those that share a sequence."""
        return self.rank // self.sizes.tp % self.sizes.cp

    @property
    def data_rank(self) -> int:
        """Which of the ``sizes.data`` shares of a batch this rank works on, together with others."""
        return self.rank // (self.sizes.cp * self.sizes.tp) % self.sizes.data

    def first_ranks_of_data_ranks(self) -> range:
        """The rank that speaks for each data rank, in their order."""
        size = self.sizes
        return range(0, size.stage, size.cp * size.tp)

    @property
    def is_first_of_data_rank(self) -> bool:
        """Whether this rank speaks for all that work on the same share of a batch."""
        return self.rank in self.first_ranks_of_data_ranks()
