"""Which process groups reach over nodes, as far as a trace tells the ranks of groups and the devices of a node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placement:
    """One process group."""

    ranks: int
    nodes: int
    devices_per_node: int

    @property
    def is_spread(self) -> bool:
        """It reaches over nodes though it would fit into one."""
        return self.nodes > 1 and self.ranks <= self.devices_per_node


def placements(facts: Mapping[str, Any]) -> dict[str, Placement]:
    """Process groups of several ranks by name, ranks being numbered node by node.

    Empty where a process sees one device only: how many a node has is not known then.
    """
    devices = facts.get("deviceProperties")
    distributed = facts.get("distributedInfo")
    groups = distributed.get("pg_config") if isinstance(distributed, dict) else None
    count = len(devices) if isinstance(devices, list) else 0
    if count < 2 or not isinstance(groups, list):
        return {}
    found = {}
    for group in groups:
        name, ranks = (group.get("pg_name"), group.get("ranks")) if isinstance(group, dict) else (None, None)
        if isinstance(name, str) and isinstance(ranks, list) and len(ranks) > 1:
            numbers = [rank for rank in ranks if type(rank) is int and rank >= 0]
            if len(numbers) == len(ranks):
                found[name] = Placement(len(ranks), len({rank // count for rank in numbers}), count)
    return found
