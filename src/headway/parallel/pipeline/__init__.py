"""Pipeline parallelism: a library's model cut into stages, and the schedules that run them."""

from headway.parallel.pipeline.cuts import BlockCosts, balanced_cuts
from headway.parallel.pipeline.pipeline import Pipeline
from headway.parallel.pipeline.plan import SCHEDULES, PipelinePlan, plan_pipeline, reshards_after_forward
from headway.parallel.pipeline.split import Split, Stage, split_into_stages
from headway.parallel.pipeline.staged_model import StagedModel, check_gradients
from headway.parallel.pipeline.stand_ins import StandIn

__all__ = [
    "SCHEDULES",
    "BlockCosts",
    "Pipeline",
    "PipelinePlan",
    "Split",
    "Stage",
    "StagedModel",
    "StandIn",
    "balanced_cuts",
    "check_gradients",
    "plan_pipeline",
    "reshards_after_forward",
    "split_into_stages",
]
