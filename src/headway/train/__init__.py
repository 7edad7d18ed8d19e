"""The Trainer and what surrounds it: objectives, optimizers, averages, checkpoints, metrics, samples."""

from headway.train.assembly import Assembly, Objective, assemble
from headway.train.checkpoint_manifest import newest_good
from headway.train.checkpoint_reading import read_full, read_values
from headway.train.checkpoints import Checkpoints
from headway.train.console import RunConsole
from headway.train.ema import Ema
from headway.train.run import Outcome, run_recipe, sample_name
from headway.train.run_directory import RunDirectory, read_events, read_metrics
from headway.train.stop import SIGNALS, clear_request, pending_request, request_stop
from headway.train.summary import RunSummary, summarise
from headway.train.trainer import Progress, StepResult, Trainer
from headway.train.vocabulary import read_tokenizers

__all__ = [
    "SIGNALS",
    "Assembly",
    "Checkpoints",
    "Ema",
    "Objective",
    "Outcome",
    "Progress",
    "RunConsole",
    "RunDirectory",
    "RunSummary",
    "StepResult",
    "Trainer",
    "assemble",
    "clear_request",
    "newest_good",
    "pending_request",
    "read_events",
    "read_full",
    "read_metrics",
    "read_tokenizers",
    "read_values",
    "request_stop",
    "run_recipe",
    "sample_name",
    "summarise",
]
