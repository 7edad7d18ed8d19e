"""The model of a row, by its dimensions where the row states them, else by its name; and its sequences' length."""

import re
from dataclasses import replace

from headway.plan.known_models import known_model
from headway.plan.runs_table import Run
from headway.plan.shape import Attention, Block, ModelShape

NOT_GATED = r"gpt|mpt|nemotron|falcon|bloom|opt\b"
"""Families whose MLP has two matrices."""


def shape_of(run: Run) -> ModelShape | None:
    """The model of a row; None where it is not known."""
    known = known_model(run.model)
    special = known is not None and any(block.experts or block.state_space for block in known.blocks)
    layers, hidden = run.whole("layers"), run.whole("hidden")
    if known is not None and (special or not hidden):
        shape = known.with_layers(layers) if layers else known
        several = re.match(r"Megatron-Bridge|NeMo \(DGXC", run.framework) and "w/o MTP" not in run.model
        shape = shape.with_predicted_tokens() if several else shape
        return replace(shape, vocabulary=run.whole("vocab") or shape.vocabulary)
    if not (layers and hidden):
        return known
    if known is not None and not known.vocabulary:
        return known.with_layers(layers)
    return _from_dimensions(run, known)


def _from_dimensions(run: Run, known: ModelShape | None) -> ModelShape:
    hidden, layers = run.whole("hidden"), run.whole("layers")
    heads = run.whole("heads") or max(1, hidden // 128)
    kv_heads = run.whole("kv_heads")
    if not kv_heads and known is not None and known.blocks[0].attention:
        kv_heads = known.blocks[0].attention.kv_heads
    gated = not re.search(NOT_GATED, run.model.lower())
    width = run.whole("ffn_hidden") or (4 * hidden if not gated else round(8 * hidden / 3 / 256) * 256)
    is_gpt = bool(re.search(r"gpt", run.model.lower()))
    is_mpt = bool(re.search(r"mpt", run.model.lower()))
    one_layer = "ONE transformer layer" in run.model
    attention = Attention(heads, kv_heads or heads, hidden // heads, rotary=not (is_gpt or is_mpt))
    vocabulary = run.whole("vocab") or (known.vocabulary if known else 0) or (_gpt_vocabulary(run) if is_gpt else 0)
    return ModelShape(
        name=run.model,
        hidden=hidden,
        blocks=(Block(layers, attention=attention, mlp_width=width, gated=gated),),
        vocabulary=0 if one_layer else vocabulary,
        tied=is_gpt or is_mpt,
        learned_positions=run.whole("seq_len") if is_gpt and not one_layer else 0,
        norm="layer" if is_gpt or is_mpt else "rms",
    )


def _gpt_vocabulary(run: Run) -> int:
    """GPT-2's tokens; Megatron's own runs fill them up to 51,200."""
    return 50257 if "Megatron-DeepSpeed" in run.framework else 51200


USUAL_SEQUENCES = (
    (r"nanotron", 4096),
    (r"torchtitan", 8192),
    (r"litgpt", 512),
    (r"maxtext.*llama2|llama2.*maxtext", 4096),
    (r"nemotron", 4096),
    (r"llama ?3", 8192),
    (r"llama ?2", 4096),
    (r"gpt", 2048),
)
"""Where a table leaves it out: nanotron's benchmark, torchtitan's and NeMo's recipes; litgpt pads each Alpaca batch."""


def sequence_of(run: Run, shape: ModelShape) -> int | None:
    """Tokens of a sample; None where nothing says."""
    if run.whole("seq_len"):
        return run.whole("seq_len")
    if not shape.vocabulary:
        return latent_tokens(run)
    text = f"{run.framework} {run.model}".lower()
    return next((tokens for pattern, tokens in USUAL_SEQUENCES if re.search(pattern, text)), None)


def latent_tokens(run: Run) -> int | None:
    """Tokens of a video from frames x height x width in the notes: 8 pixels a latent, 2 a patch, 4 frames; text 226."""
    found = re.search(r"(\d+)x(\d+)x(\d+)", run.notes)
    frames, height, width = (int(size) for size in found.groups()) if found else (49, 480, 720)
    if "cogvideox" not in run.model.lower():
        return None
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16) + 226
