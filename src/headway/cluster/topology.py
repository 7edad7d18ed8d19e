"""A cluster: its accelerator, its nodes, and its links by level; and where on them a group of ranks lies."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.cluster.achieved import Achieved, LinkRate
from headway.cluster.catalogue import Accelerator, Positive

PositiveInt = Annotated[int, Field(ge=1)]


class Level(BaseModel):
    """One level of links, from the innermost (NVLink) outwards (rails, spine)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    devices: PositiveInt
    """Devices that reach each other without leaving this level."""
    gb_per_s_unidirectional: Positive
    """GB/s (1e9 bytes) of one device, one way. Where devices share a network interface: their share of it."""
    topology: Literal["switch", "mesh", "bus"] = "switch"
    """switch: any device reaches any at full rate; mesh: a link of its own to each other device, so that few devices
    use few links; bus: devices share the host's PCIe."""
    rails: PositiveInt | None = None
    """Network interfaces of a node that have a switch of their own; None: not known, taken as one for each device."""
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """How many times more bandwidth enters the level than leaves it: 2 is half the bandwidth when all send at once."""
    achieved: LinkRate


class Cluster(BaseModel):
    """Devices of one kind in nodes of one kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    accelerator: Accelerator
    devices_per_node: PositiveInt
    """Devices that share a host."""
    power_cap_w: Positive | None = None
    """Power limit of a device when it is lower than sold."""
    levels: tuple[Level, ...]
    """Innermost first; the last one joins all devices."""
    achieved: Achieved
    source: str = ""

    @model_validator(mode="after")
    def _levels_grow(self) -> "Cluster":
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.devices <= inner.devices or outer.devices % inner.devices:
                raise ValueError(
                    f"level {outer.name!r} joins {outer.devices} devices: it must be a multiple of the "
                    f"{inner.devices} of level {inner.name!r}"
                )
        return self

    def group(self, size: int, stride: int = 1) -> "Group":
        """The group of ranks 0, stride, 2·stride, …: one communicator of a mesh axis.

        ``size`` ranks; ``stride`` is the product of the mesh's axes inside of it. Raises ValueError when the cluster
        has fewer devices.
        """
        if not self.levels:
            if size > 1:
                raise ValueError(f"cluster {self.name} has one device: no group of {size}")
            return Group(size, ())
        inside = [min(size, max(1, level.devices // stride)) for level in self.levels]
        if inside[-1] < size:
            raise ValueError(
                f"a group of {size} ranks {stride} apart does not fit on the {self.levels[-1].devices} devices"
            )
        return Group(size, tuple(zip(self.levels, inside, strict=True)))


@dataclass(frozen=True)
class Group:
    """A communicator on a cluster's links."""

    size: int
    inside: tuple[tuple[Level, int], ...]
    """For each level, innermost first, how many ranks of the group share a domain of it."""

    def is_innermost(self, level: Level) -> bool:
        """Whether ``level`` is the cluster's innermost one."""
        return level is self.inside[0][0]

    def used(self) -> list[tuple[Level, int, int]]:
        """The levels that the group's messages cross: (level, ranks inside a domain of it, parts that it joins)."""
        used, below = [], 1
        for level, ranks in self.inside:
            if ranks > below:
                used.append((level, ranks, -(-ranks // below)))
            below = ranks
        return used
