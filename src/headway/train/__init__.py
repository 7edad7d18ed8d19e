"""The Trainer and what surrounds it: objectives, optimizers, averages, checkpoints, metrics, samples."""

from headway.train.assembly import Assembly, Objective, assemble
from headway.train.checkpoint_manifest import newest_good
from headway.train.checkpoint_reading import read_full, read_values
from headway.train.checkpoints import Checkpoints
from headway.train.ema import Ema
from headway.train.loading import training_loader
from headway.train.run import Outcome, run_recipe
from headway.train.trainer import Progress, StepResult, Trainer
from headway.train.vocabulary import read_tokenizers

__all__ = [
    "Assembly",
    "Checkpoints",
    "Ema",
    "Objective",
    "Outcome",
    "Progress",
    "StepResult",
    "Trainer",
    "assemble",
    "newest_good",
    "read_full",
    "read_tokenizers",
    "read_values",
    "run_recipe",
    "training_loader",
]
