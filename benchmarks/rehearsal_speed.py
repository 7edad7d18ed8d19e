"""Seconds that a rehearsal takes on one core, from few blocks and from all of them.

Wan 2.1 14B at 81 frames of 480x832 on 256 devices, Llama 3.1 405B on 1,024 in 8 (tensor) x 16 (pipeline) x 8 (data),
FLUX.1-dev at 1,024² on 64 and Llama 3.1 8B on 64 with 16 micro-batches: all by their published configs, with full
activation checkpointing, text encoders and VAE. Processor seconds, imports not counted, of records alone and with what
the cluster makes of them: time, memory and shares. The rehearsal from few blocks comes first in
each process: it alone runs the frozen encoders, and results of operators that it met are known to the other. The last
column holds one way against the other: the largest relative difference of step time, peak memory and the number of each
operator.
Run: python benchmarks/rehearsal_speed.py --json benchmarks/results/rehearsal_speed.json
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401 - imports are not rehearsal
import torch
import transformers  # noqa: F401

from headway.cluster import Cluster, cluster_named
from headway.recipe import Recipe, parse_recipe
from headway.rehearse import Prediction, Record, predict, rehearse, rehearse_whole, roles

CLUSTER = "dgx-h100"
T5 = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""The encoder of T5 1.1 XXL and of UMT5 XXL."""
CLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "vocab_size": 49408, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
FLUX_VAE = {
    "latent_channels": 16, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "act_fn": "silu",
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
MODEL_TYPES = {"UMT5EncoderModel": "umt5", "T5EncoderModel": "t5", "CLIPTextModel": "clip_text_model"}
LENGTHS = {"UMT5EncoderModel": 512, "T5EncoderModel": 512, "CLIPTextModel": 77}
"""Tokens of a caption."""
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip


def language(config: dict[str, Any], global_batch: int, **layout: Any) -> Recipe:
    """Sequences of 8,192 tokens."""
    document = {
        "model": {"class_name": "LlamaForCausalLM", "tokenizer": "bytes", "config": config},
        "objective": {"kind": "next_token"},
        "data": {"kind": "jsonl_text", "path": "text.jsonl", "sequence_length": 8192},
        "run": {"steps": 1, "global_batch": global_batch, "micro_batch": 1},
        "memory": {"activation_checkpointing": "full"},
        "layout": layout,
    }
    return parse_recipe(document, "benchmark")


def diffusion(
    folder: Path,
    model: dict[str, Any],
    parts: dict[str, tuple[str, dict[str, Any]]],
    data: dict[str, Any],
    devices: int,
) -> Recipe:
    """One sample a device. ``parts``: of the pipeline's folder, frozen: subfolder -> class and config."""
    for name, (class_name, config) in parts.items():
        (folder / name).mkdir(parents=True)
        names = {"_class_name": class_name, "architectures": [class_name], "model_type": MODEL_TYPES.get(class_name)}
        (folder / name / "config.json").write_text(json.dumps(names | config))
    encoders = {
        name: {"class_name": class_name, "path": folder, "subfolder": name, "tokenizer": "words"}
        | {"max_length": LENGTHS[class_name]}
        for name, (class_name, _) in parts.items()
        if name != "vae"
    }
    document = {
        "model": model
        | {"text_encoders": encoders, "latents": {"vae_class": parts["vae"][0], "path": folder, "subfolder": "vae"}},
        "objective": {"kind": "flow_matching"},
        "data": data,
        "run": {"steps": 1, "global_batch": devices, "micro_batch": 1},
        "memory": {"activation_checkpointing": "full"},
    }
    return parse_recipe(document, "benchmark")


def wan(folder: Path) -> Recipe:
    """Text to video; diffusers' defaults are those of Wan 2.1 14B."""
    return diffusion(
        folder,
        {"class_name": "WanTransformer3DModel", "config": {"num_layers": 40}},
        {"text_encoder": ("UMT5EncoderModel", T5 | {"vocab_size": 256384}), "vae": ("AutoencoderKLWan", {})},
        {"kind": "video_folder", "path": "clips", "resolution": [480, 832], "frames": 81},
        256,
    )


def flux(folder: Path) -> Recipe:
    """FLUX.1-dev at 1,024²; diffusers' defaults are its."""
    return diffusion(
        folder,
        {"class_name": "FluxTransformer2DModel", "config": {"guidance_embeds": True}},
        {
            "text_encoder": ("CLIPTextModel", CLIP),
            "text_encoder_2": ("T5EncoderModel", T5 | {"vocab_size": 32128}),
            "vae": ("AutoencoderKL", FLUX_VAE),
        },
        {"kind": "image_folder", "path": "pictures", "resolution": 1024},
        64,
    )


def cases(folder: Path) -> dict[str, tuple[Recipe, int]]:
    """Name -> recipe and devices."""
    return {
        "Wan 2.1 14B": (wan(folder / "wan"), 256),
        "Llama 3.1 405B": (language(LLAMA_405B, 8 * 32, tp=8, pp=16), 1024),
        "FLUX.1-dev": (flux(folder / "flux"), 64),
        "Llama 3.1 8B": (language(LLAMA_8B, 64 * 16), 64),
    }


@dataclass(frozen=True)
class Way:
    """One way to rehearse a case."""

    records_s: float
    all_s: float
    """With what the cluster makes of the records: time, memory and shares."""
    prediction: Prediction
    counts: Counter[str]
    """How often each operator ran on all simulated ranks."""

    def as_json(self) -> dict[str, Any]:
        """For the table."""
        return {"records_s": self.records_s, "all_s": self.all_s, "operators": self.counts.total()}


def measured(recipe: Recipe, devices: int, cluster: Cluster, rehearsed: Callable[[Recipe, int, int], Record]) -> Way:
    """Rehearse one rank of each pipeline place and predict."""
    counts: Counter[str] = Counter()
    seconds = 0.0

    def records() -> Iterator[Record]:
        nonlocal seconds
        for role in roles(recipe, devices):
            began = time.process_time()
            record = rehearsed(recipe, devices, role.rank)
            seconds += time.process_time() - began
            counts.update(operator.name for operator in record.operators)
            yield record

    began = time.process_time()
    prediction = predict(records(), cluster)
    prediction.as_json()
    return Way(seconds, time.process_time() - began, prediction, counts)


def difference(one: Way, other: Way) -> float:
    """The largest relative one of step time, peak memory and how often each operator runs."""
    pairs: list[tuple[float, float]] = [(one.counts[name], other.counts[name]) for name in one.counts | other.counts]
    pairs.append((one.prediction.step_time_s.value, other.prediction.step_time_s.value))
    pairs.append((one.prediction.memory.peak_bytes, other.prediction.memory.peak_bytes))
    return max(abs(a - b) / max(a, b) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names of cases (all)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = cluster_named(CLUSTER)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, devices) in cases(Path(folder)).items():
            if arguments.names and not name.startswith(tuple(arguments.names)):
                continue
            extended = measured(recipe, devices, cluster, rehearse)
            print(name, "extended", extended.as_json(), flush=True)
            whole = measured(recipe, devices, cluster, rehearse_whole)
            print(name, "whole", whole.as_json(), flush=True)
            row = {"model": name, "devices": devices, "ranks_rehearsed": len(roles(recipe, devices))}
            ways = {"extended": extended.as_json(), "whole": whole.as_json()}
            rows.append(row | ways | {"difference": difference(extended, whole)})
            print(rows[-1], flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
