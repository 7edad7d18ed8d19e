"""Rehearsal: the real training step of one rank of many, run on fake tensors and fake ranks, and written down."""

from headway.rehearse.dress_rehearsal import rehearse_whole
from headway.rehearse.durations import check_devices
from headway.rehearse.memory import Holding, Memory
from headway.rehearse.model_on_meta import model_on_meta
from headway.rehearse.page import write_page
from headway.rehearse.predicted_timeline import timeline_of
from headway.rehearse.prediction import Prediction, Shares, predict
from headway.rehearse.program import Program, program_of
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
from headway.rehearse.simulate import Ranged, RankTimes, Simulation, simulate

__all__ = [
    "BEFORE",
    "COMPUTE",
    "Access",
    "Allocation",
    "Attention",
    "Collective",
    "Facts",
    "Group",
    "Holding",
    "HostRead",
    "Memory",
    "Operator",
    "Prediction",
    "Product",
    "Program",
    "Ranged",
    "RankTimes",
    "Record",
    "Role",
    "Shares",
    "Simulation",
    "StageAction",
    "check_devices",
    "model_on_meta",
    "predict",
    "program_of",
    "rehearse",
    "rehearse_whole",
    "roles",
    "simulate",
    "timeline_of",
    "write_page",
]
