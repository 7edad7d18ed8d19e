"""Which module gets which style, for each kind of model.

transformers ships plans for decoders (``_tp_plan``): names of modules and styles. They are taken from there and
completed: gradients of head norms, fewer key-value heads than ranks, sequence parallelism. diffusers ships plans for a
few denoisers, with wrong gradients of head norms, and packed weights whose global layout is a permutation. So here its
attention and feed-forward modules are divided by their type, in the models listed in ``BLOCKS``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, NamedTuple

from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxSingleTransformerBlock
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.errors import UserError
from headway.parallel.tensor_parallel_boundaries import gathered, joined, scattered, shared, split, summed
from headway.parallel.tensor_parallel_styles import (
    Column,
    Count,
    Division,
    Enter,
    Exit,
    GroupedHeads,
    KeyValueColumn,
    NormAcrossHeads,
    PackedColumn,
    PackedRow,
    PartialGradients,
    Row,
    Style,
    base_of,
)
from headway.parallel.vocabulary_parallel import VocabularyEmbedding, VocabularyHead

BLOCKS = {
    "FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "SD3Transformer2DModel": ("transformer_blocks",),
    "WanTransformer3DModel": ("blocks",),
    "PixArtTransformer2DModel": ("transformer_blocks",),
    "SanaTransformer2DModel": ("transformer_blocks",),
}
"""Denoisers that can be divided, and their lists of blocks."""
DECODER = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
UNSHIPPED = {"Qwen3VLTextModel": DECODER}
"""Plans of decoders for which transformers has none."""


class Step(NamedTuple):
    """One module and what is done to it."""

    path: str
    module: Any
    style: Style


def steps_of(model: nn.Module, sequence: bool) -> list[Step]:
    """All that tensor parallelism does to ``model``, in order. Raises UserError when there is no plan for its class."""
    if isinstance(model, PreTrainedModel):
        return list(_language_model(model, sequence))
    name = type(model).__name__
    if name not in BLOCKS:
        raise UserError(f"layout.tp: there is no tensor-parallel plan for {name}: set layout.tp = 1")
    return [step for blocks in BLOCKS[name] for step in _denoiser_blocks(blocks, model.get_submodule(blocks))]


def _holds_parameters(module: nn.Module) -> bool:
    """False for what stands in for a block of another pipeline stage."""
    return next(module.parameters(), None) is not None


# Denoisers of diffusers


def _denoiser_blocks(path: str, blocks: nn.Module) -> Iterator[Step]:
    single: set[str] = set()
    for name, module in blocks.named_modules(prefix=path):
        match module:
            case FluxSingleTransformerBlock() if _holds_parameters(module):
                single.add(f"{name}.attn")
                yield from _flux_single_block(name, module)
            case Attention() | FluxAttention() | WanAttention() if name not in single:
                yield Step(name, module, Enter(shared, ("encoder_hidden_states",)))
                yield from _attention(name, module)
            case FeedForward():
                yield from _feed_forward(name, module)
            case GLUMBConv():
                yield from _gated_convolutions(name, module)


def _attention(path: str, attention: Any) -> Iterator[Step]:
    """Whole heads on each rank."""
    modules = dict(attention.named_modules())
    yield Step(path, attention, Count("heads", "attention heads"))
    planned = []
    for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
        planned += [Step(name, modules[name], Column())] if name in modules else []
    for name in ("to_out.0", "to_add_out"):
        planned += [Step(name, modules[name], Row())] if name in modules else []
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        planned += [Step(name, modules[name], _head_norm(path, attention, modules[name]))] if name in modules else []
    _check_all_planned(path, attention, {step.path for step in planned})
    yield from (Step(f"{path}.{name}", module, style) for name, module, style in planned)


def _head_norm(path: str, attention: Any, norm: Any) -> Style:
    width = base_of(attention.to_q).out_features
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.numel() == width // attention.heads:
        return PartialGradients()
    if weight is not None and weight.numel() == width and "RMSNorm" in type(norm).__name__:
        return NormAcrossHeads()
    raise UserError(f"layout.tp: {path} norms queries and keys by {norm}, which can't be divided: set layout.tp = 1")


def _feed_forward(path: str, module: Any) -> Iterator[Step]:
    first, last = module.net[0].proj, module.net[2]
    if base_of(first).out_features != base_of(last).in_features:
        raise UserError(f"layout.tp: {path} has a gated activation, which can't be divided: set layout.tp = 1")
    yield Step(path, module, Enter(shared))
    yield Step(f"{path}.net.0.proj", first, Column())
    yield Step(f"{path}.net.2", last, Row())


def _flux_single_block(path: str, block: Any) -> Iterator[Step]:
    """Attention and feed-forward side by side: one boundary before both, one weight after both."""
    yield Step(f"{path}.norm", block.norm, Exit(shared))
    yield from _attention(f"{path}.attn", block.attn)
    yield Step(f"{path}.proj_mlp", block.proj_mlp, Column())
    streams = (base_of(block.attn.to_q).out_features, block.mlp_hidden_dim)
    yield Step(f"{path}.proj_out", block.proj_out, PackedRow(streams=streams))


def _gated_convolutions(path: str, module: Any) -> Iterator[Step]:
    """Sana's feed-forward: values and gates in one weight, then a convolution of each channel by itself."""
    width = module.conv_point.in_channels
    yield Step(path, module, Enter(shared))
    yield Step(f"{path}.conv_inverted", module.conv_inverted, PackedColumn((width, width)))
    yield Step(f"{path}.conv_depth", module.conv_depth, PackedColumn((width, width)))
    yield Step(f"{path}.conv_depth", module.conv_depth, Count("groups", "channels"))
    yield Step(f"{path}.conv_point", module.conv_point, Row())


def _check_all_planned(path: str, module: nn.Module, planned: set[str]) -> None:
    for name, _ in module.named_parameters():
        if not any(name.startswith(f"{prefix}.") for prefix in planned):
            raise UserError(f"layout.tp: {path}.{name} has no place in the tensor-parallel plan: set layout.tp = 1")


# Language models of transformers


def _language_model(model: Any, sequence: bool) -> Iterator[Step]:
    """The decoder and the vocabulary; whatever else there is (a vision tower) stays whole on every rank.

    A stage of a pipeline has some of the layers: what travels between stages stays split over tokens.
    """
    decoder = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is decoder)
    entries = _layer_entries(decoder)
    layers = [(f"{path}.layers.{i}", layer) for i, layer in enumerate(decoder.layers) if _holds_parameters(layer)]
    if sequence and layers[0][1] is decoder.layers[0]:
        # Positions and masks are known by then: the decoder derives them from the length of what enters it.
        yield Step(*layers[0], Enter(split))
    for name, layer in layers:
        yield from _layer(name, layer, entries, sequence)
    if sequence and layers[-1][1] is decoder.layers[-1]:
        yield Step(*layers[-1], Exit(joined))
    if sequence and hasattr(decoder, "_deepstack_process"):
        yield Step(path, decoder, WholeDeepstack())
    yield from _vocabulary(model)


def _layer_entries(decoder: Any) -> dict[str, str]:
    """Pattern of names within a layer -> style. Experts are left out: expert parallelism divides them, or nobody."""
    name = type(decoder).__name__
    shipped = {pattern: style for pattern, style in decoder._tp_plan.items() if pattern != "embed_tokens"}
    entries = {}
    for pattern, style in (shipped or UNSHIPPED.get(name, {})).items():
        if "experts" in pattern.split("."):
            continue
        known = style in ("colwise", "rowwise", "replicated_with_grad_allreduce")
        if not known or not pattern.startswith("layers.*."):
            raise UserError(f"layout.tp: {name} asks for {style} of {pattern}, which is not known: set layout.tp = 1")
        entries[pattern.removeprefix("layers.*.")] = style
    if not entries:
        raise UserError(f"layout.tp: there is no tensor-parallel plan for {name}: set layout.tp = 1")
    return entries


def _layer(path: str, layer: nn.Module, entries: dict[str, str], sequence: bool) -> Iterator[Step]:
    """One decoder layer: regions (attention, feed-forward) between boundaries, and what stands between the regions."""
    regions: dict[str, dict[str, str]] = {}
    for name, _ in layer.named_modules():
        style = next((style for pattern, style in entries.items() if fnmatch(name, pattern)), None)
        if style is not None:
            container, _, own = name.rpartition(".")
            regions.setdefault(container, {})[own] = style
    by_tokens = {name for name in regions if sequence and "." not in name}
    for name, styles in regions.items():
        yield from _region(f"{path}.{name}", layer.get_submodule(name), styles, name in by_tokens)
    if sequence:
        yield from _between_regions(path, layer, by_tokens)


def _region(path: str, region: Any, styles: dict[str, str], by_tokens: bool) -> Iterator[Step]:
    """Column divisions into row divisions. ``by_tokens``: what enters and leaves is split over tokens."""
    _check_all_planned(path, region, set(styles))
    yield Step(path, region, Enter(gathered if by_tokens else shared))
    modules = {name: region.get_submodule(name) for name in styles}
    key_values = 0
    if "Attention" in type(region).__name__:
        key_values = _key_value_heads(path, region, modules)
        queries = base_of(modules["o_proj"]).in_features // region.head_dim
        yield Step(path, region, GroupedHeads(queries, key_values))
    for name, style in styles.items():
        yield Step(f"{path}.{name}", modules[name], _style(path, name, modules[name], style, key_values, by_tokens))


def _key_value_heads(path: str, attention: Any, modules: dict[str, Any]) -> int:
    if not {"q_proj", "k_proj", "v_proj", "o_proj"} <= modules.keys() or not hasattr(attention, "num_key_value_groups"):
        raise UserError(f"layout.tp: the heads of {path} are in a form that is not known: set layout.tp = 1")
    return base_of(modules["k_proj"]).out_features // attention.head_dim


def _style(path: str, name: str, module: Any, style: str, key_values: int, by_tokens: bool) -> Style:
    if style == "colwise":
        return KeyValueColumn(key_values) if key_values and name in ("k_proj", "v_proj") else Column()
    if style == "rowwise":
        return Row(leave=scattered if by_tokens else summed)
    if any(parameter.ndim > 1 for parameter in module.parameters()):
        raise UserError(f"layout.tp: {path}.{name} has weights of its own for each head: set layout.tp = 1")
    return PartialGradients()


def _between_regions(path: str, layer: nn.Module, regions: set[str]) -> Iterator[Step]:
    """Norms see each rank's tokens; what else is no region (experts and their router) sees all tokens on every rank."""
    for name, child in layer.named_children():
        if name in regions or not _holds_parameters(child):
            continue
        if "Norm" in type(child).__name__:
            yield Step(f"{path}.{name}", child, PartialGradients())
        else:
            yield Step(f"{path}.{name}", child, Enter(joined))
            yield Step(f"{path}.{name}", child, Exit(split))
    for name, _ in layer.named_parameters(recurse=False):
        raise UserError(
            f"layout.sequence_parallel: {path}.{name} has no place in the plan: set layout.sequence_parallel = false"
        )


@dataclass(frozen=True)
class WholeDeepstack(Style):
    """Qwen3-VL adds features of pictures between its first layers, at places that are known for all tokens only."""

    def apply(self, module: Any, division: Division) -> None:
        add, mesh = module._deepstack_process, division.mesh

        def add_to_all_tokens(tokens: Tensor, places: Tensor, features: Tensor) -> Tensor:
            return split(add(joined(tokens, mesh), places, features), mesh)

        module._deepstack_process = add_to_all_tokens


def _vocabulary(model: Any) -> Iterator[Step]:
    paths = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(embedding).forward is nn.Embedding.forward
    tied = head is not None and getattr(embedding, "weight", None) is getattr(base_of(head), "weight", None)
    if plain:
        yield Step(paths[id(embedding)], embedding, VocabularyEmbedding())
    # A head tied to an embedding that does more than look up stays whole with it.
    if isinstance(base_of(head), nn.Linear) and (plain or not tied):
        yield Step(paths[id(head)], head, VocabularyHead())
