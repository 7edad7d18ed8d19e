"""Context parallelism of diffusers' denoisers: their tokens split on entry, their velocity gathered on exit.

Where, is said by the plans that the library ships (``_cp_plan``), and by ours where it ships none. The library's own
application of them refuses what this one does: lengths that do not divide, rings without flash kernels, CPUs, sharing
ranks with tensor parallelism. Text is split as images are: nothing is computed twice, and each rank has its part of
every gradient.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headway.parallel.context_parallel.all_to_all import gather
from headway.parallel.context_parallel.processors import ContextParallelProcessor, WholeTextProcessor
from headway.parallel.context_parallel.ranks import ContextRanks
from headway.parallel.context_parallel.split import StreamSplit

ACTIVATIONS = ("hidden_states", "encoder_hidden_states")
"""Arguments that carry tokens from block to block; others of a plan (positions), every pipeline stage has whole."""

Plan = Mapping[str, Any]
"""Module -> {argument's name, or output's index: ContextParallelInput}, or a ContextParallelOutput."""


def _flux_streams(config: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    return arguments["txt_ids"].shape[0], arguments["img_ids"].shape[0]


def _sd3_streams(config: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    return *_image_stream(config, arguments), arguments["encoder_hidden_states"].shape[1]


def _image_stream(config: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    height, width = arguments["hidden_states"].shape[-2:]
    return (height // config.patch_size * (width // config.patch_size),)


def _video_stream(config: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    frames, height, width = (
        size // patch for size, patch in zip(arguments["hidden_states"].shape[-3:], config.patch_size, strict=True)
    )
    return (frames * height * width,)


@dataclass(frozen=True)
class Denoiser:
    """What is particular to the denoisers of one class."""

    streams: Callable[[Any, Mapping[str, Any]], tuple[int, ...]]
    """(config, arguments of forward) -> tokens of the streams that attend to each other, in the order of attention."""
    image: int
    """Which stream the velocity is of."""
    attention: tuple[str, ...]
    """Last names of the modules whose queries and keys are both split; text that is only read stays whole."""
    keyword: str | None
    """The forward's dictionary that reaches attention processors; None: what comes with the rotary tables does."""
    whole_text: tuple[str, ...] = ()
    """Last names of modules that only read text, and are given ``keyword`` too."""
    plan: Plan | None = None
    """Where diffusers ships none."""


def _tokens(*names: str) -> dict[str, ContextParallelInput]:
    return {name: ContextParallelInput(split_dim=1, expected_dims=3) for name in names}


_VELOCITY = ContextParallelOutput(gather_dim=1, expected_dims=3)

DENOISERS = {
    "FluxTransformer2DModel": Denoiser(_flux_streams, 1, ("attn",), "joint_attention_kwargs"),
    "SD3Transformer2DModel": Denoiser(
        _sd3_streams, 0, ("attn", "attn2"), "joint_attention_kwargs",
        plan={"transformer_blocks.0": _tokens("hidden_states", "encoder_hidden_states"), "proj_out": _VELOCITY},
    ),
    "WanTransformer3DModel": Denoiser(_video_stream, 0, ("attn1",), None),
    "PixArtTransformer2DModel": Denoiser(
        _image_stream, 0, ("attn1",), "cross_attention_kwargs", ("attn2",),
        plan={"transformer_blocks.0": _tokens("hidden_states"), "proj_out": _VELOCITY},
    ),
}  # fmt: skip


def apply_context_parallel_diffusion(
    transformer: Any, cp: DeviceMesh, *, first: bool = True, last: bool = True
) -> None:
    """Split the tokens of a denoiser of diffusers over the ranks of ``cp``, in place.

    All ranks must give it the same whole inputs and compute the same from its whole output; gradients of parameters
    are then parts that sum up over ``cp``. Of a pipeline's stages only the ``first`` splits the tokens and only the
    ``last`` gathers them; each is given the same arguments, from which positions and lengths are read.
    """
    denoiser = DENOISERS[type(transformer).__name__]
    ranks = ContextRanks.of(cp)
    split = StreamSplit(ranks.ring.size(), ranks.ulysses.size())
    for name, module in transformer.named_modules():
        if name.rpartition(".")[2] in denoiser.attention:
            module.set_processor(ContextParallelProcessor(module.processor, ranks, split))
        elif name.rpartition(".")[2] in denoiser.whole_text:
            module.set_processor(WholeTextProcessor(module.processor))
    boundaries = _Boundaries(denoiser, ranks, split, transformer)
    transformer.register_forward_pre_hook(boundaries.count_streams, with_kwargs=True)
    for name, crossing in (denoiser.plan or transformer._cp_plan).items():
        module = transformer.get_submodule(name)
        if isinstance(crossing, ContextParallelOutput):
            if last:
                module.register_forward_hook(boundaries.gathering(crossing.gather_dim))
            continue
        inputs = {key: c for key, c in crossing.items() if not c.split_output and (first or key not in ACTIVATIONS)}
        if inputs:
            module.register_forward_pre_hook(boundaries.splitting_inputs(module, inputs), with_kwargs=True)
        outputs = {key: c for key, c in crossing.items() if c.split_output}
        if outputs:
            module.register_forward_hook(boundaries.splitting_outputs(outputs))


class _Boundaries:
    """Hooks of one denoiser. Blocks that are recomputed in the backward pass read nothing from here."""

    def __init__(self, denoiser: Denoiser, ranks: ContextRanks, split: StreamSplit, transformer: nn.Module) -> None:
        self._denoiser = denoiser
        self._ranks = ranks
        self._split = split
        self._names = _argument_names(transformer)
        self._streams: tuple[int, ...] = ()
        """Of the forward pass under way."""

    def count_streams(self, transformer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Tell attention how many tokens there are, before anything is split."""
        named = dict(zip(self._names, arguments, strict=False)) | keywords
        self._streams = self._denoiser.streams(transformer.config, named)
        name = self._denoiser.keyword
        if name is None:
            return None
        return arguments, keywords | {name: (named.get(name) or {}) | {"streams": self._streams}}

    def splitting_inputs(self, module: nn.Module, inputs: Mapping[str, ContextParallelInput]) -> Callable[..., Any]:
        """A pre-hook of ``module`` that leaves it this rank's tokens of the arguments named."""
        names = _argument_names(module)

        def split_inputs(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            given = list(arguments)
            for name, crossing in inputs.items():
                if name in keywords:
                    keywords[name] = self._piece(keywords[name], crossing)
                elif (place := names.index(name)) < len(given):
                    given[place] = self._piece(given[place], crossing)
            return tuple(given), keywords

        return split_inputs

    def splitting_outputs(self, outputs: Mapping[int, ContextParallelInput]) -> Callable[..., Any]:
        """A hook of the module that makes rotary tables; their whole length goes on to attention with them."""

        def split_outputs(module: Any, arguments: Any, output: tuple[Tensor, ...]) -> tuple[Any, ...]:
            pieces = [self._piece(tensor, outputs[place]) for place, tensor in enumerate(output)]
            return (*pieces, output[0].shape[outputs[0].split_dim])

        return split_outputs

    def gathering(self, dim: int) -> Callable[..., Tensor]:
        """A hook that gives every rank the whole output, without padding."""
        groups = self._ranks.ring, self._ranks.ulysses

        def gather_output(module: Any, arguments: Any, output: Tensor) -> Tensor:
            return gather(output, dim, groups).narrow(dim, 0, self._streams[self._denoiser.image])

        return gather_output

    def _piece(self, value: Any, crossing: ContextParallelInput) -> Any:
        """Timesteps, for one, are split only where every token has its own."""
        if value is None or value.dim() != crossing.expected_dims:
            return value
        return self._split.shard(value, crossing.split_dim, self._ranks.place)


def _argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]
