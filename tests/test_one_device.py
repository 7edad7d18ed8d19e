"""On one rank the model is held whole, and trains to the bit as fully_shard over that rank would train it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.parallel import FullyShardedModel, Masters
from headway.parallel.one_device import OneDevice
from headway.recipe import EmaRecipe, OptimRecipe
from headway.train.ema import Ema
from headway.train.optimizers import build_optimizers
from ranks import run_ranks


class TiedModel(nn.Module):
    """Embedding and head share a matrix; one block does not train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embedding(tokens)
        for block in self.blocks:
            states = states + torch.tanh(block(states))
        return self.head(states) * self.scale.to(states.dtype)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def train(kind: str, compute: str, master: str, steps: int = 4) -> dict[str, Any]:
    """A few steps of three micro-batches: losses, the last gradients, weights, and the loss with the average."""
    model = TiedModel().to(getattr(torch, master))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    if kind == "whole":
        laid_out = OneDevice(model, mesh, getattr(torch, compute), torch.float32)
    else:
        policy = MixedPrecisionPolicy(getattr(torch, compute), torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        laid_out = FullyShardedModel(model)
    masters = Masters(laid_out.parameters(), 1)
    optimizer = build_optimizers(masters, OptimRecipe(lr=1e-2))[0]
    ema = Ema(masters, laid_out, EmaRecipe(decays=[0.5]))
    generator = torch.Generator().manual_seed(2)
    losses, gradients = [], {}
    for step in range(steps):
        for micro in range(3):
            laid_out.begin_micro_batch(last=micro == 2)
            loss = loss_of(model, torch.randint(0, 11, (2, 5), generator=generator))
            laid_out.backward(loss / 3)
            losses.append(loss.item())
        laid_out.hand_over(masters)
        gradients = {name: shard.grad.clone() for name, shard in masters.local.items() if shard.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        laid_out.masters_changed()
        ema.update(step)
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        live = loss_of(model, tokens).item()
        with ema.swapped_in(0.5):
            averaged = loss_of(model, tokens).item()
        again = loss_of(model, tokens).item()
    weights = {name: parameter.to_local().clone() for name, parameter in masters.whole.items()}
    return {"losses": [*losses, live, averaged, again], "gradients": gradients, "weights": weights}


@pytest.mark.parametrize(
    ("compute", "master"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_a_model_held_whole_trains_as_fully_shard_over_one_rank_does(compute: str, master: str) -> None:
    (whole,) = run_ranks(1, train, "whole", compute, master)
    (sharded,) = run_ranks(1, train, "sharded", compute, master)
    assert whole["losses"] == sharded["losses"]
    for part in ("gradients", "weights"):
        assert list(whole[part]) == list(sharded[part])
        assert all(torch.equal(own, sharded[part][name]) for name, own in whole[part].items())
    live, averaged, again = whole["losses"][-3:]
    assert live == again != averaged


def layout_of(compute: str) -> dict[str, Any]:
    model = TiedModel()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    laid_out = OneDevice(model, mesh, getattr(torch, compute), torch.float32)
    masters = laid_out.parameters()
    model(torch.zeros(1, 2, dtype=torch.int64))
    return {
        "used": {name: parameter.dtype for name, parameter in model.named_parameters()},
        "buffers": {name: buffer.dtype for name, buffer in model.named_buffers()},
        "masters": {name: parameter.dtype for name, parameter in masters.items()},
        "distributed": all(isinstance(parameter, DTensor) for parameter in masters.values()),
        "shared": model.embedding.weight.data_ptr() == masters["embedding.weight"].to_local().data_ptr(),
        "tied": model.head.weight is model.embedding.weight,
    }


def test_parameters_are_used_in_the_compute_dtype_and_trained_in_the_master_dtype() -> None:
    (found,) = run_ranks(1, layout_of, "bfloat16")
    assert set(found["used"].values()) == {torch.bfloat16}
    assert set(found["buffers"].values()) == {torch.float32}
    assert set(found["masters"].values()) == {torch.float32}
    assert found["distributed"]
    assert found["tied"]
    assert "blocks.1.weight" in found["used"]
    assert "blocks.1.weight" not in found["masters"]


def test_one_dtype_needs_one_memory() -> None:
    (found,) = run_ranks(1, layout_of, "float32")
    assert found["shared"]
