"""Rehearsal: the real training step of one rank of many, run on fake tensors and fake ranks, and written down."""

from headway.rehearse.dress_rehearsal import rehearse_whole
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
from headway.rehearse.rehearsal import Role, rehearse, roles

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
    "Role",
    "StageAction",
    "rehearse",
    "rehearse_whole",
    "roles",
]
