"""The framework and the settings of a row: how it ran, from what it states and what is known of the framework."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from headway.plan.behaviour import Behaviour, behaviour_named
from headway.plan.block_time import Recomputed, Settings
from headway.plan.runs_table import Run
from headway.plan.shape import ModelShape

FRAMEWORKS = (
    (r"megatron-deepspeed", "megatron_deepspeed"),
    (r"deepspeed", "megatron_2021"),
    (r"megatron-lm 2021", "megatron_2021"),
    (r"megatron-lm 2022", "megatron_2022"),
    (r"megascale", "megascale"),
    (r"megatron-lm.*/ te|simumax", "megatron_core"),
    (r"automodel", "automodel"),
    (r"dfm", "dfm"),
    (r"megatron-bridge", "bridge"),
    (r"megatron-core", "nemo"),
    (r"primus", "primus"),
    (r"nemo", "nemo"),
    (r"megatron", "megatron_core"),
    (r"llm-foundry", "llm_foundry"),
    (r"torchtitan", "torchtitan"),
    (r"maxtext", "maxtext"),
    (r"nanotron", "nanotron"),
    (r"litgpt", "litgpt"),
    (r"finetrainers|diffusers", "diffusers"),
)
"""Behaviours by what tables call the framework."""


def framework_of(run: Run) -> Behaviour | None:
    """The behaviour of the row's framework; None where it is not known."""
    text = run.framework.lower()
    name = next((name for pattern, name in FRAMEWORKS if re.search(pattern, text)), None)
    if name is None:
        name = _framework_like(run)
    if name is None:
        return None
    changes: dict[str, Any] = {}
    if name == "torchtitan":
        if "compile" not in run.notes and "202412" in run.source:
            name = "torchtitan_eager"
        if re.search(r"async ?tp", run.notes.lower()):
            changes["tensor_exposed"] = 0.35
        if "2025" in run.framework:  # its loss is compiled too: no float32 copies of the logits but one
            changes["cross_entropy_held"] = 7.0
    if name == "automodel" and "DFM" in run.framework:  # diffusers' models: PyTorch's attention, single operators
        changes |= {"attention": {"hopper": "flash_attention_2"}, "passes": 3.0}
    if "cross-entropy fusion" in run.notes:
        changes["cross_entropy_bytes"] = 14.0
    if "pure" in run.notes.lower() and name == "llm_foundry":
        changes["gradient_bytes"] = 2.0
    if "no overlap of grad all-reduce" in run.words["dp_strategy"]:
        changes["data_overlaps"] = False
    if name == "diffusers" and "full" in run.model.lower():  # states and gradients are in the host's memory
        changes |= {"held_state_bytes": 0.0, "held_gradient_bytes": 0.0}
    if "ONE transformer layer" in run.model:
        changes |= {"optimizer_bytes": 0.0, "operators_step": 0.0}
    changes |= _quantisation(run)
    changes |= _recipe(run).get("behaviour", {})
    if "ep overlap on" in run.notes.lower():
        changes["expert_exposed"] = 0.3
    elif "ep overlap off" in run.notes.lower():
        changes["expert_exposed"] = 1.0
    if "tokendrop" in run.model:
        changes |= {"operators_expert_forward": 25.0, "operators_expert_backward": 35.0}
    return behaviour_named(name, **changes)


def _framework_like(run: Run) -> str | None:
    """For a framework that is not known: one that lays models out the same way."""
    if run.whole("tp") > 1 or run.whole("pp") > 1 or run.whole("ep") > 1:
        return "nemo"
    return "torchtitan" if "fsdp" in run.words["dp_strategy"] else None


def _quantisation(run: Run) -> dict[str, Any]:
    precision = run.words["precision"]
    if "rowwise" in precision:
        return {"quantise": "rowwise"}
    return {}


def settings_of(run: Run, shape: ModelShape, sequence: int) -> Settings:
    """Precision, sharing and recomputation of a row."""
    layers, parts = _recomputation(run)
    lora = re.search(r"\[(?:LoRA|Adapter)(?: r=(\d+))?", run.model)
    return Settings(
        sequence=sequence,
        precision=_precision(run),
        data_parallel=_data_parallel(run),
        recompute_layers=layers,
        recompute=frozenset(parts),
        lora_rank=int(lora[1] or 8) if lora else 0,
        lora_on=_adapted(run),
        scaled_outputs="Adapter v2" in run.source,
        float32_norms=shape.norm == "rms" and not re.search(r"StableLM|Falcon", run.model),
        weight_bytes=_weight_bytes(run),
        longest=_longest(run, shape),
    )


def _precision(run: Run) -> Any:
    precision = run.words["precision"]
    if "fp4" in precision:
        return "float4"
    if "fp8" in precision:
        return "float8"
    return "float16" if "fp16" in precision or (not precision and "Megatron" in run.framework) else "bfloat16"


def _weight_bytes(run: Run) -> float | None:
    if "nf4-dq" in run.words["precision"]:
        return 0.52
    return 0.5625 if "nf4" in run.words["precision"] else None


def _adapted(run: Run) -> Any:
    """litgpt adapts queries and values, diffusers' trainers attention, NeMo all projections."""
    if "litgpt" in run.framework and "Adapter v2" not in run.source:
        return "queries"
    return "attention" if "finetrainers" in run.framework else "all"


def _longest(run: Run, shape: ModelShape) -> int:
    """Tokens of the longest sample where the notes say so (fewer with a large vocabulary); 0 where they don't."""
    found = re.search(r"longest (\d+)-(\d+) tokens", run.notes)
    if not found:
        return 0
    return int(found[1] if shape.vocabulary > 50_000 else found[2])


def _data_parallel(run: Run) -> Any:
    stated = run.words["dp_strategy"]
    if "fsdp" in stated or "zero3" in stated:
        return "fsdp"
    if "zero0" in stated or re.search(r"Megatron-LM 202|Megatron-DeepSpeed", run.framework):
        return "ddp"
    if run.whole("num_gpus", 1) == 1:
        return "ddp"
    return "distributed_optimizer"


def _recomputation(run: Run) -> tuple[float, set[Recomputed]]:
    """(share of layers, parts of every layer) whose forward pass runs again."""
    stated = run.words["recompute"]
    if "ground_truth_single" in run.source:
        return 0.0, set()  # its times leave no room for a fourth pass: that would take 290 of 312 TFLOP/s
    some = re.search(r"(\d+) of (\d+) layers", stated)
    if some:
        return int(some[1]) / int(some[2]), set()
    if stated.startswith("full"):
        return 1.0, set()
    if stated.startswith("selective (op)") or stated.startswith("selective (per op)"):
        return 0.0, {"half_products"}
    if stated.startswith("selective:"):
        names: dict[str, Recomputed] = {"mlp": "mlp", "core_attn": "core_attention", "layernorm": "norm"}
        return 0.0, {part for name, part in names.items() if name in stated}
    if stated.startswith("selective"):
        return 0.0, {"core_attention"}
    if not stated and "maxtext" in run.framework.lower():
        return 0.0, {"mlp", "norm"}
    return 0.0, set(_recipe(run).get("recompute", ()))


def _recipe(run: Run) -> dict[str, Any]:
    """What a published recipe of this model on this accelerator states besides (recipes.toml)."""
    words = f"{run.framework} | {run.model} | {run.gpu} | {run.words['precision']}".lower()
    for entry in _recipes():
        if re.search(entry["match"], words):
            return entry
    return {}


@cache
def _recipes() -> list[dict[str, Any]]:
    text = files("headway.plan").joinpath("recipes.toml").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = tomllib.loads(text)["recipe"]
    return entries
