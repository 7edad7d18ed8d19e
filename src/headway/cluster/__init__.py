"""The hardware that a run stands on: accelerators, what kernels reach on them, and clusters with their links."""

from headway.cluster.achieved import (
    Achieved,
    AttentionRate,
    CacheRate,
    HostRate,
    KindRate,
    LinkRate,
    MatrixRate,
    MemoryRate,
    OperatorKind,
    Rate,
    achieved_on,
    link_achieved_on,
)
from headway.cluster.catalogue import (
    Accelerator,
    Precision,
    accelerator_named,
    accelerator_of_device,
    load_catalogue,
)
from headway.cluster.load import cluster_named, cluster_of, load_cluster, parse_cluster
from headway.cluster.topology import Cluster, Group, Level
from headway.cluster.write import cluster_toml

__all__ = [
    "Accelerator",
    "Achieved",
    "AttentionRate",
    "CacheRate",
    "Cluster",
    "Group",
    "HostRate",
    "KindRate",
    "Level",
    "LinkRate",
    "MatrixRate",
    "MemoryRate",
    "OperatorKind",
    "Precision",
    "Rate",
    "accelerator_named",
    "accelerator_of_device",
    "achieved_on",
    "cluster_named",
    "cluster_of",
    "cluster_toml",
    "link_achieved_on",
    "load_catalogue",
    "load_cluster",
    "parse_cluster",
]
