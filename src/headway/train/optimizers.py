"""Optimizers over sharded parameters, their learning rate, and their state by parameter name."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.errors import UserError
from headway.parallel import Masters
from headway.recipe import OptimRecipe
from headway.train.muon import ShardedMuon
from headway.train.stochastic_adamw import StochasticAdamW


def build_optimizers(
    masters: Masters,
    optim: OptimRecipe,
    matrix_parameters: Collection[str] = (),
    *,
    rounding_seed: int | None = None,
) -> list[torch.optim.Optimizer]:
    """The optimizers of the trained parameters' shards: one, or Muon and AdamW.

    Parameters of fewer than two dimensions (norms, biases, scales) get no weight decay; embeddings do, as in the
    published recipes of GPT-2/3, Llama and DiT. ``matrix_parameters`` names the repeated blocks' 2-D matrices: with
    ``kind = "muon"`` they get Muon with learning rates matched to AdamW's root mean square (Liu et al. 2025) and
    everything else AdamW. With a ``rounding_seed`` bfloat16 weights get AdamW with stochastic rounding. Raises
    UserError when nothing is trainable or when the optimizer can't run here.
    """
    if not masters.local:
        raise UserError("no parameter of the model is trainable: model.freeze covers all of it; shorten that list")
    if optim.kind == "adamw_8bit":
        return [_adamw_8bit(masters.local, optim)]
    if rounding_seed is not None:
        settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        stochastic = StochasticAdamW(masters, _groups(masters.local, optim), seed=rounding_seed, **settings)
        _remember_learning_rate(stochastic)
        return [stochastic]
    matrices = [name for name in masters.local if optim.kind == "muon" and name in matrix_parameters]
    rest = {name: p for name, p in masters.local.items() if name not in matrices}
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            ShardedMuon(
                {name: masters.local[name] for name in matrices},
                masters.whole,
                lr=optim.muon_lr,
                weight_decay=optim.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if rest:
        optimizers.append(
            torch.optim.AdamW(_groups(rest, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        )
    for optimizer in optimizers:
        _remember_learning_rate(optimizer)
    return optimizers


def _groups(parameters: dict[str, nn.Parameter], optim: OptimRecipe) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _remember_learning_rate(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to ``factor`` times the recipe's."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(factor * group["initial_lr"])
            else:
                group["lr"] = factor * group["initial_lr"]


def _adamw_8bit(parameters: dict[str, nn.Parameter], optim: OptimRecipe) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f'optim.kind = "adamw_8bit" needs torchao, which can\'t be imported here ({error}): '
            'pip install "headway[low-precision]", or use optim.kind = "adamw"'
        ) from error
    device = next(iter(parameters.values())).device
    try:
        # torchao compiles its step: find out now whether this machine can, not at the first step.
        trial = nn.Parameter(torch.zeros(4096, device=device))
        trial.grad = torch.zeros_like(trial)
        AdamW8bit([trial]).step()
    except Exception as error:
        raise UserError(
            f'optim.kind = "adamw_8bit" does not run on {device.type} here: {type(error).__name__}: {error}; '
            'use optim.kind = "adamw"'
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        _groups(parameters, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps
    )
    _remember_learning_rate(optimizer)
    return optimizer


def optimizer_state(masters: Masters, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, torch.Tensor]]:
    """{parameter name: {state name: tensor}}: DTensors sharded like the parameter, and scalar step counts.

    Before the first step it holds the zeros that a first step would begin with, so a checkpoint can be loaded into it.
    Hyperparameters are left out: they come from the recipe. The tensors are the optimizers' own, except 8-bit
    states: these are given in float32, which any number of ranks can share out, with the values that quantise to the
    same codes and scales again. ``load_optimizer_state`` takes them back.
    """
    names = {shard: name for name, shard in masters.local.items()}
    return {
        names[shard]: {
            key: value if value.dim() == 0 else masters.like(names[shard], _dequantised(value))
            for key, value in own.items()
        }
        for optimizer in optimizers
        for shard, own in shard_states(optimizer)
    }


@torch.no_grad()
def load_optimizer_state(
    masters: Masters, optimizers: list[torch.optim.Optimizer], state: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Take over a state of ``optimizer_state``'s form, on the same mesh."""
    names = {shard: name for name, shard in masters.local.items()}
    for optimizer in optimizers:
        for shard, own in shard_states(optimizer):
            for key, value in own.items():
                loaded = state[names[shard]][key]
                value.copy_(loaded.to_local() if isinstance(loaded, DTensor) else loaded)
        if isinstance(optimizer, StochasticAdamW):
            optimizer.state_loaded()


def shard_states(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, dict[str, torch.Tensor]]]:
    """Each shard with its state, which is made where the first step has not made it yet."""
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    for shard in shards:
        if not optimizer.state[shard]:
            optimizer.state[shard] = _first_state(optimizer, shard)
    return [(shard, optimizer.state[shard]) for shard in shards]


def _first_state(optimizer: torch.optim.Optimizer, shard: nn.Parameter) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, StochasticAdamW):
        return optimizer.state_of(shard)
    if isinstance(optimizer, ShardedMuon):
        return {"momentum_buffer": torch.zeros_like(shard)}
    if isinstance(optimizer, torch.optim.AdamW):
        return {
            "step": torch.zeros((), dtype=torch.float32, device=shard.device),
            "exp_avg": torch.zeros_like(shard),
            "exp_avg_sq": torch.zeros_like(shard),
        }
    new_buffer: Any = optimizer._new_buffer  # type: ignore[attr-defined]
    signed, unsigned = new_buffer(shard, True), new_buffer(shard, False)
    return {"step": torch.tensor(0.0), "exp_avg": signed, "exp_avg_sq": unsigned}


def _dequantised(value: Any) -> torch.Tensor:
    # torchao quantises a shard only when it is large enough and full of whole blocks: this differs between ranks.
    if type(value) is torch.Tensor:
        return value
    from torchao.optim.quant_utils import dequant_with_qmap

    levels = value.qmap.clone()
    if value.signed:
        # The lowest level stands for -1, though its value is -0.993: without its full size a block whose largest number
        # is negative would get a smaller scale when it is quantised again.
        levels[0] = -1
    whole: torch.Tensor = dequant_with_qmap(value.codes, levels, value.scale)
    return whole
