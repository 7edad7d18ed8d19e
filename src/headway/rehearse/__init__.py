"""Rehearsal: the real training step of one rank of many, run on fake tensors and fake ranks, and written down."""

from headway.rehearse.record import (
    BEFORE,
    COMPUTE,
    Access,
    Allocation,
    Attention,
    Collective,
    Facts,
    Group,
    HostRead,
    Operator,
    Product,
    Record,
    StageAction,
)

__all__ = [
    "BEFORE",
    "COMPUTE",
    "Access",
    "Allocation",
    "Attention",
    "Collective",
    "Facts",
    "Group",
    "HostRead",
    "Operator",
    "Product",
    "Record",
    "StageAction",
]
