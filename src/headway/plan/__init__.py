"""Planning: what a step of any layout takes in time and memory, and how well that holds on published runs."""

from headway.plan.behaviour import Behaviour, behaviour_named
from headway.plan.block_time import Settings
from headway.plan.known_models import known_model
from headway.plan.layout import Layouts, layouts
from headway.plan.mapping import Case, Unmapped, case_of
from headway.plan.memory import Memory, memory
from headway.plan.parts import PARTS, Parts
from headway.plan.prediction import Prediction, predict
from headway.plan.runs_table import Run, read_runs
from headway.plan.shape import Attention, Block, Experts, ModelShape, StateSpace
from headway.plan.step_time import StepTime, step_time
from headway.plan.validation import Errors, RowResult, Summary, Validation, validate

__all__ = [
    "PARTS",
    "Attention",
    "Behaviour",
    "Block",
    "Case",
    "Errors",
    "Experts",
    "Layouts",
    "Memory",
    "ModelShape",
    "Parts",
    "Prediction",
    "RowResult",
    "Run",
    "Settings",
    "StateSpace",
    "StepTime",
    "Summary",
    "Unmapped",
    "Validation",
    "behaviour_named",
    "case_of",
    "known_model",
    "layouts",
    "memory",
    "predict",
    "read_runs",
    "step_time",
    "validate",
]
