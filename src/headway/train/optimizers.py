"""Optimizers over sharded parameters, their learning rate, and their state by parameter name."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.errors import UserError
from headway.recipe import OptimRecipe
from headway.train.muon import ShardedMuon
from headway.train.sharded import sharded_like, trainable_parameters


class LocalAdamW(torch.optim.AdamW):
    """AdamW that steps on the shards and keeps its state as DTensors.

    The update is element-wise, so it is the same; going through DTensor costs two to three times the step itself
    on small models.
    """

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *tensor_lists)  # type: ignore[no-untyped-call]
        for tensors in tensor_lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return has_complex


def build_optimizers(
    model: nn.Module, optim: OptimRecipe, matrix_parameters: Collection[str] = ()
) -> list[torch.optim.Optimizer]:
    """The optimizers of a sharded model's trainable parameters: one, or Muon and AdamW.

    Parameters of fewer than two dimensions (norms, biases, scales) get no weight decay; embeddings do, as in the
    published recipes of GPT-2/3, Llama and DiT. ``matrix_parameters`` names the repeated blocks' 2-D matrices: with
    ``kind = "muon"`` they get Muon with learning rates matched to AdamW's root mean square (Liu et al. 2025) and
    everything else AdamW. Raises UserError when nothing is trainable or when the optimizer can't run here.
    """
    parameters = trainable_parameters(model)
    if not parameters:
        raise UserError("no parameter of the model is trainable: model.freeze covers all of it; shorten that list")
    if optim.kind == "adamw_8bit":
        return [_adamw_8bit(parameters, optim)]
    matrices = [p for name, p in parameters.items() if optim.kind == "muon" and name in matrix_parameters]
    rest = {name: p for name, p in parameters.items() if optim.kind != "muon" or name not in matrix_parameters}
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            ShardedMuon(matrices, lr=optim.muon_lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    if rest:
        optimizers.append(LocalAdamW(_groups(rest, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True))
    for optimizer in optimizers:
        _remember_learning_rate(optimizer)
    return optimizers


def _groups(parameters: dict[str, DTensor], optim: OptimRecipe) -> list[dict[str, Any]]:
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


def _adamw_8bit(parameters: dict[str, DTensor], optim: OptimRecipe) -> torch.optim.Optimizer:
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


def optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, torch.Tensor]]:
    """{parameter name: {state name: tensor}}: DTensors sharded like the parameter, and scalar step counts.

    Before the first step it holds the zeros that a first step would begin with, so a checkpoint can be loaded into it.
    Hyperparameters are left out: they come from the recipe. The tensors are the optimizers' own, except 8-bit
    states: these are given in float32, which any number of ranks can share out, with the values that quantise to the
    same codes and scales again. ``load_optimizer_state`` takes them back.
    """
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    state = {names[p]: dict(own) for optimizer in optimizers for p, own in _states(optimizer)}
    for optimizer in optimizers:
        if not isinstance(optimizer, LocalAdamW | ShardedMuon):
            for parameter, own in _states(optimizer):
                state[names[parameter]] |= {key: _dequantised(own[key], parameter) for key in ("exp_avg", "exp_avg_sq")}
    return state


@torch.no_grad()
def load_optimizer_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Take over a state of ``optimizer_state``'s form, on the same mesh."""
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    for optimizer in optimizers:
        for parameter, own in _states(optimizer):
            for key, value in own.items():
                _local(value).copy_(_local(state[names[parameter]][key]))


def _states(optimizer: torch.optim.Optimizer) -> list[tuple[Any, dict[str, Any]]]:
    """Each parameter with its state, which is made where the first step has not made it yet."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = _first_state(optimizer, parameter)
    return [(parameter, optimizer.state[parameter]) for parameter in parameters]


def _first_state(optimizer: torch.optim.Optimizer, parameter: DTensor) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, ShardedMuon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(optimizer, LocalAdamW):
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    new_buffer: Any = optimizer._new_buffer  # type: ignore[attr-defined]
    signed, unsigned = new_buffer(parameter, True), new_buffer(parameter, False)
    return {"step": torch.tensor(0.0), "exp_avg": signed, "exp_avg_sq": unsigned}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dequantised(value: torch.Tensor, parameter: DTensor) -> DTensor:
    # torchao quantises a shard only when it is large enough and full of whole blocks: this differs between ranks.
    local: Any = _local(value)
    if type(local) is torch.Tensor:
        return sharded_like(local.float(), parameter)
    from torchao.optim.quant_utils import dequant_with_qmap

    levels = local.qmap.clone()
    if local.signed:
        # The lowest level stands for -1, though its value is -0.993: without its full size a block whose largest number
        # is negative would get a smaller scale when it is quantised again.
        levels[0] = -1
    return sharded_like(dequant_with_qmap(local.codes, levels, local.scale), parameter)
