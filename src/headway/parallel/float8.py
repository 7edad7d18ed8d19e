"""Matrix products in float8: which of a model's linear layers take part, and what they become.

Weights stay as they are, in the master dtype; a product quantises its operands when it is computed, each with a scale
of its own numbers at that moment. So there is no state: nothing to checkpoint, to reshard or to restore, and a block
that is recomputed for its backward pass finds the scales that it found before. Names of parameters do not change.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.errors import UserError
from headway.parallel.mxfp8 import MXFP8Linear
from headway.recipe import LayoutRecipe, PrecisionRecipe

MULTIPLES = {"float8_tensorwise": 16, "float8_rowwise": 16, "mxfp8": 32}
"""Of both sides of a weight: 16 bytes, as cuBLAS takes float8 (its documentation, float8 usage), or a whole block."""
CAPABILITIES = {"float8_tensorwise": (8, 9), "float8_rowwise": (8, 9), "mxfp8": (10, 0)}
"""Compute capability of the first GPUs with such products: Ada and Hopper, Blackwell."""


def check_float8(precision: PrecisionRecipe, layout: LayoutRecipe, device: torch.device) -> None:
    """Raises UserError for a GPU or a layout that the products or gathers of ``precision`` do not go with."""
    for axis, size in (("tp", layout.tp), ("pp", layout.pp)):
        if precision.float8_all_gather and size > 1:
            raise UserError(
                f"precision.float8_all_gather does not go with layout.{axis} = {size}: set layout.{axis} = 1, or leave "
                "float8_all_gather out"
            )
    # A rehearsal has a GPU by name alone.
    if precision.matmul == "compute" or device.type != "cuda" or not torch.cuda.is_available():
        return
    found, needed = torch.cuda.get_device_capability(device), CAPABILITIES[precision.matmul]
    if found < needed:
        able = [name for name, capability in CAPABILITIES.items() if capability <= found]
        raise UserError(
            f'precision.matmul = "{precision.matmul}" needs compute capability {needed[0]}.{needed[1]}, and '
            f'{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: set "{(able or ["compute"])[-1]}"'
        )


def lower_products(
    module: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    precision: PrecisionRecipe,
    device: torch.device,
    ranks: int = 1,
) -> list[str]:
    """Let the linear layers of ``blocks`` multiply as ``precision.matmul`` says; return their names in ``module``.

    To be called before stages, tensor parallelism and sharding. ``blocks`` are (name in the module, block), in the
    order in which they run. Layers that ``precision.keep_high`` names, that do not train, or whose sides are no
    multiples (``MULTIPLES``) stay. On CPUs products are of the same rounded numbers, in float32. With
    ``precision.float8_all_gather`` and several ``ranks`` weights are quantised before they are gathered.

    Raises UserError when no layer is left, or without torchao.
    """
    if precision.matmul == "compute":
        return []
    multiple = MULTIPLES[precision.matmul]
    names = lowered_names(blocks, precision.keep_high, multiple)
    if not names:
        raise UserError(
            f'precision.matmul = "{precision.matmul}": no layer is left for it, as precision.keep_high names them all, '
            f"they do not train, or {multiple} does not divide their sides: shorten precision.keep_high, or set "
            'precision.matmul = "compute"'
        )
    if precision.matmul == "mxfp8":
        for name in names:
            module.get_submodule(name).__class__ = MXFP8Linear
    else:
        gathered = precision.float8_all_gather and ranks > 1
        _with_torchao(module, set(names), precision.matmul, emulated=device.type == "cpu", gathered=gathered)
    return names


def lowered_names(blocks: Sequence[tuple[str, nn.Module]], keep_high: Sequence[str], multiple: int) -> list[str]:
    """Names of the layers that take part."""
    words = {0: "first_block", len(blocks) - 1: "last_block"}
    names = []
    for number, (block_name, block) in enumerate(blocks):
        if words.get(number) in keep_high:
            continue
        for name, layer in block.named_modules():
            if type(layer) is not nn.Linear or not layer.weight.requires_grad:
                continue
            whole = f"{block_name}.{name}"
            kept = any(fnmatchcase(name, pattern) or fnmatchcase(whole, pattern) for pattern in keep_high)
            if not kept and layer.in_features % multiple == 0 and layer.out_features % multiple == 0:
                names.append(whole)
    return names


def check_divided(module: nn.Module, names: Sequence[str], precision: PrecisionRecipe, tp: int) -> None:
    """Raises UserError where a rank's part of a weight, after tensor parallelism, has sides that are no multiples."""
    parameters = dict(module.named_parameters())
    for name in names:
        weight = parameters.get(f"{name}.weight")  # None: on another stage
        if weight is None:
            continue
        multiple = MULTIPLES[precision.matmul]
        sides = list(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape)
        if any(side % multiple for side in sides):
            raise UserError(
                f'layout.tp = {tp} leaves {sides} of {name}, and "{precision.matmul}" needs sides that are multiples '
                f'of {multiple}: use a smaller layout.tp, or add "*{name.rpartition(".")[2]}" to precision.keep_high'
            )


def gathers_float8(module: nn.Module) -> bool:
    """Whether weights of the sharded ``module`` are quantised before they are gathered."""
    locals_ = (p.to_local() for p in module.parameters() if isinstance(p, DTensor))
    return any(is_traceable_wrapper_subclass(local) for local in locals_)


def find_gathered_scales(module: nn.Module) -> None:
    """Find the scales of all weights that are gathered as float8 with one collective; all ranks must call it.

    Otherwise each weight would have one of its own, each time it is gathered.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(module)


def _with_torchao(module: nn.Module, names: set[str], matmul: str, *, emulated: bool, gathered: bool) -> None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f'precision.matmul = "{matmul}" needs torchao, which can\'t be imported here ({error}): '
            'pip install "headway[low-precision]", or set precision.matmul = "compute"'
        ) from error
    config = replace(
        Float8LinearConfig.from_recipe_name(matmul.removeprefix("float8_")),
        emulate=emulated,
        pad_inner_dim=True,  # the number of tokens is the inner side of a weight's gradient
        enable_fsdp_float8_all_gather=gathered,
    )
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in names)
