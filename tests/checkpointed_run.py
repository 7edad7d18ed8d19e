"""A run of a small sharded model that saves and loads checkpoints, for the tests of both."""

import json
from pathlib import Path

import torch.distributed as dist

from headway.parallel import FullyShardedModel, Masters
from headway.recipe import CheckpointRecipe, EmaRecipe, OptimRecipe
from headway.train.checkpoints import Checkpoints
from headway.train.ema import Ema
from headway.train.optimizers import build_optimizers, load_optimizer_state, optimizer_state
from shards import full, set_gradients, shard, uneven_model


class Run:
    """Model, optimizers and EMA of one rank, with a few steps behind them."""

    def __init__(self, directory: Path, replicate: int = 1, steps: int = 0, seed: int = 0, **recipe) -> None:
        self.events: list[tuple[str, dict]] = []
        self.model = shard(uneven_model(seed), replicate)
        laid_out = FullyShardedModel(self.model)
        self.masters = Masters(laid_out.parameters(), dist.get_world_size())
        self.optimizers = build_optimizers(self.masters, OptimRecipe(kind="muon", eps=1e-3), {"0.weight", "1.weight"})
        self.ema = Ema(self.masters, laid_out, EmaRecipe(decays=[0.5, 0.999]))
        self.checkpoints = Checkpoints(directory, CheckpointRecipe(**recipe), self.on_event)
        for number in range(steps):
            self.step(number)

    def on_event(self, kind: str, fields: dict) -> None:
        self.events.append((kind, json.loads(json.dumps(fields))))

    def step(self, number: int) -> None:
        set_gradients(self.masters, number)
        for optimizer in self.optimizers:
            optimizer.step()
        self.ema.update(number)

    def state(self, **values) -> dict:
        return {
            "model": dict(self.masters.whole),
            "optimizer": optimizer_state(self.masters, self.optimizers),
            "ema": self.ema.state_dict(),
            "trainer": values,
        }

    def load(self, path: Path) -> dict:
        state = self.state()
        self.checkpoints.load(path, state)
        load_optimizer_state(self.masters, self.optimizers, state["optimizer"])
        self.ema.load_state_dict(state["ema"])
        return state["trainer"]

    def whole(self) -> dict:
        state = self.state()
        return {
            "model": full(state["model"]),
            "optimizer": {name: full(values) for name, values in state["optimizer"].items()},
            "ema": {decay: full(values) for decay, values in state["ema"].items()},
        }

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def save_steps(directory: Path, steps: list[int]) -> None:
    run = Run(directory)
    for step in steps:
        run.step(step)
        run.checkpoints.save(step, run.state(step=step), final=True)
