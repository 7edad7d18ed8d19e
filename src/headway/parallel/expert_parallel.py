"""Expert parallelism: each rank of a group holds whole experts, and tokens travel to theirs and back.

Which parameters are experts is read from the plan that transformers ships with a model (``base_model_ep_plan``), and
what an expert computes is the library's. Dispatch and combine are ours: the library's sort is not stable, so activation
checkpointing that keeps what was exchanged and recomputes the order could pair rows with the wrong tokens; and it knows
no pair of token and expert that is not to be computed.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headway.errors import UserError


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that hold the experts of a layer, by name; none of a model without experts."""
    modules = dict(model.named_modules())
    return {name: modules[name] for name, style in _plan(model).items() if style == "ep_dispatch_experts"}


def check_expert_parallel(model: nn.Module, ep: int, ranks: int) -> None:
    """Raise UserError unless ``ep`` ranks can share the experts of each layer.

    ``ranks`` share one copy of a pipeline stage: dp_shard x cp x tp.
    """
    if ep == 1:
        return
    experts = {_number(module) for module in expert_modules(model).values()}
    if not experts:
        raise UserError(
            f"layout.ep = {ep} needs a mixture of experts with an expert-parallel plan, and {type(model).__name__} has "
            "none: set layout.ep = 1"
        )
    common = math.gcd(*experts, ranks)
    if common % ep:
        nearest = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - ep))
        raise UserError(
            f"layout.ep = {ep} must divide both the {' and '.join(map(str, sorted(experts)))} experts of each layer of "
            f"{type(model).__name__} and the {ranks} ranks that share a copy of the model (dp_shard x cp x tp): the "
            f"nearest that does is {nearest}"
        )
    for name, module in expert_modules(model).items():
        whole = [held for held, _ in module.named_parameters() if _plan(model).get(f"{name}.{held}") != "grouped_gemm"]
        if whole:
            raise UserError(
                f"layout.ep = {ep}: {name}.{whole[0]} of {type(model).__name__} does not belong to one expert each, so "
                "it cannot be split over ranks: set layout.ep = 1"
            )


def apply_expert_parallel(model: nn.Module, ep: DeviceMesh, tp: DeviceMesh | None) -> None:
    """Split the experts of every layer over the one-dimensional mesh ``ep``, and make tokens travel to them.

    ``model`` is changed in place, on meta or filled. Each expert parameter (E, …) becomes a DTensor of its whole shape,
    ``Shard(0)`` over ``ep``; names stay. Ranks of ``tp`` hold the same tokens: each of them sends its own part, so that
    no token is computed twice, and gets the results of all. ``ep`` and ``tp`` may overlap in any way.

    The gradient of an expert's weights then covers the tokens of all ranks of ``ep``: see ``shard_experts``.
    """
    if ep.size() == 1:
        return
    plan = _plan(model)
    for name, experts in expert_modules(model).items():
        for held, parameter in list(experts.named_parameters(recurse=False)):
            if plan.get(f"{name}.{held}") == "grouped_gemm":
                part = distribute_tensor(parameter.detach(), ep, [Shard(0)], src_data_rank=None)
                setattr(experts, held, nn.Parameter(part, requires_grad=parameter.requires_grad))
        number: Any = experts.num_experts
        experts.num_experts = number // ep.size()  # how many the library's forward finds in its weights
        experts.forward = _reached(experts, ep, tp if tp is not None and tp.size() > 1 else None)


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    data_ranks: int,
    reshard_after_forward: Callable[[nn.Module], bool],
) -> None:
    """``fully_shard`` the experts of every layer over the ranks of ``mesh`` that hold the same ones.

    To be called before the blocks around them are sharded. ``mesh`` has the dimensions dp_replicate, expert_shard and
    ep. ``data_ranks`` is the size of the mesh of all other parameters (dp_replicate x dp_shard x cp): FSDP averages
    their gradients over it, so an expert's, which is a sum over the same tokens, is divided by it too.
    ``reshard_after_forward``: of a layer's experts, whether they are freed between forward and backward.
    """
    axes = ("dp_replicate", "expert_shard") if mesh["dp_replicate"].size() > 1 else "expert_shard"
    ranks = mesh["expert_shard"].size()
    for experts in expert_modules(model).values():
        unit = fully_shard(
            experts,
            mesh=mesh[axes],
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward(experts),
            shard_placement_fn=functools.partial(_dimension_to_shard, ep=mesh["ep"].size(), ranks=ranks),
        )
        unit.set_gradient_divide_factor(float(data_ranks))
        # Dividing within the collective is refused by gloo and loses bfloat16 gradients on NCCL (pytorch 190747).
        # Over one rank there is no collective, and FSDP divides by itself.
        unit.set_force_sum_reduction_for_comms(ranks > 1)


def _dimension_to_shard(parameter: nn.Parameter, ep: int, ranks: int) -> Shard:
    """Whole experts if they go round, else the first dimension that does: FSDP pads dimension 0 only."""
    sizes = (parameter.shape[0] // ep, *parameter.shape[1:])
    return Shard(next((axis for axis, size in enumerate(sizes) if size % ranks == 0), 0))


def _plan(model: nn.Module) -> dict[str, str]:
    """Name of a module or parameter -> the style of the library's expert-parallel plan."""
    plan: Any = getattr(model, "_ep_plan", None)
    expand: Any = getattr(model, "_expand_parallel_plan", None)
    return expand(dict(plan)) if plan else {}


def _number(experts: nn.Module) -> int:
    return next(experts.parameters()).shape[0]


# Tokens on their way


def exchange_sizes(sent: Tensor, received: Tensor, pairs: int) -> tuple[list[int], list[int]]:
    """Rows for and from each rank of a group, from counts (ranks, experts of a rank), on the host.

    The one place where a layer waits for its device. A rehearsal, whose counts hold no numbers, puts a function in its
    place that divides this rank's ``pairs`` of token and expert evenly.
    """
    to_others, from_others = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return to_others, from_others


def _reached(experts: nn.Module, ep: DeviceMesh, tp: DeviceMesh | None) -> Callable[..., Tensor]:
    """The forward of ``experts`` for tokens of all ranks of ``ep``.

    It takes hidden states (T, H), the chosen experts (T, k) and their weights (T, k), and returns (T, H). An expert
    number that is the number of experts means none: such a pair is not sent and adds nothing.
    """
    compute = experts.forward

    # How many rows arrive is known only at run time, so there is nothing here for a compiler to fuse.
    @torch.compiler.disable
    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if tp is None:
            return _exchanged(experts, compute, ep, hidden, chosen, weights)
        parts = (_part_of(tensor, tp) for tensor in (hidden, chosen, weights))
        return _whole_of(_exchanged(experts, compute, ep, *parts), tp, hidden.shape)

    return forward


def _exchanged(
    experts: nn.Module,
    compute: Callable[..., Tensor],
    ep: DeviceMesh,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    tokens, per_token = chosen.shape
    number: Any = experts.num_experts
    order = chosen.flatten().argsort(stable=True)  # the rank of an expert follows from its number
    counts = torch.zeros(number * ep.size() + 1, dtype=torch.int64, device=chosen.device)
    sent = counts.scatter_add(0, chosen.flatten(), torch.ones_like(order))[:-1].view(ep.size(), number)
    received = wait_tensor(all_to_all_single(sent, None, None, ep))
    to_others, from_others = exchange_sizes(sent, received, chosen.numel())

    order = order[: sum(to_others)]
    rows = wait_tensor(all_to_all_single_autograd(hidden[order // per_token], from_others, to_others, ep))
    local = torch.arange(number, device=chosen.device).repeat(ep.size())
    local = local.repeat_interleave(received.flatten(), output_size=sum(from_others))
    with _local_parameters(experts):
        results = _computed(compute, rows, local)
    results = wait_tensor(all_to_all_single_autograd(results.contiguous(), to_others, from_others, ep))

    by_pair = hidden.new_zeros(tokens * per_token, hidden.shape[1]).index_copy(0, order, results)
    weighted = by_pair.view(tokens, per_token, -1) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def _computed(compute: Callable[..., Tensor], rows: Tensor, local: Tensor) -> Tensor:
    """Each row through its one expert, unweighted. Without rows one of zeros is computed and cut off.

    The weights then have gradients on every rank: FSDP's reduction over the ranks waits for all of them.
    """
    if len(rows) == 0:
        rows, local = rows.sum(0, keepdim=True), local.new_zeros(1)
        return compute(rows, local.unsqueeze(1), rows.new_ones(1, 1))[:0]
    return compute(rows, local.unsqueeze(1), rows.new_ones(len(rows), 1))


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Let the module compute with this rank's part of each parameter; gradients reach the whole ones."""
    parameters: dict[str, Any] = module._parameters
    whole = dict(parameters)
    parameters.update({name: part.to_local() for name, part in whole.items() if isinstance(part, DTensor)})
    try:
        yield
    finally:
        parameters.update(whole)


def _part_of(tensor: Tensor, tp: DeviceMesh) -> Tensor:
    """This rank's rows of a tensor that all ranks of ``tp`` hold alike; gradients are gathered."""
    whole = DTensor.from_local(tensor, tp, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _whole_of(rows: Tensor, tp: DeviceMesh, shape: torch.Size) -> Tensor:
    """The rows of all ranks of ``tp``; each keeps its part of the gradient, which all of them have whole."""
    stride = (shape[1], 1)
    parts = DTensor.from_local(rows.contiguous(), tp, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return parts.redistribute(placements=[Replicate()]).to_local()
