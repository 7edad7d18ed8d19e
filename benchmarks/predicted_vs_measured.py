"""Predicted beside measured: step time and peak resident memory of real runs on this machine's CPU over gloo.

The machine is calibrated with as many ranks as a run has (``headway calibrate``), the run's step is rehearsed and
predicted on that cluster (``headway rehearse``), and then ``headway train`` runs it: language, pictures and video;
one rank and two; DDP, FSDP2, tensor, pipeline and context parallelism, accumulation, checkpointing. Nothing is fitted
to the runs. A rank has one thread. Measured are the median step, waiting for data left out, and the peak resident
memory of a rank (VmHWM).
``within`` says whether the measured value lies in the predicted range.
Run: python benchmarks/predicted_vs_measured.py --json benchmarks/results/predicted_vs_measured.json
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import av
import numpy as np
from PIL import Image

from headway.calibrate import calibrate
from headway.cluster import Cluster, cluster_of, cluster_toml
from headway.recipe import Recipe, parse_recipe, to_toml
from headway.rehearse import predict, rehearse, roles

STEPS, WARM_UPS = 24, 6
COLOURS = ("red", "green", "blue", "gray")
DECODER = {
    "class_name": "Qwen3ForCausalLM",
    "tokenizer": "bytes",
    "config": {
        "vocab_size": 260, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False,
    },
}  # fmt: skip
CLIP = {
    "class_name": "CLIPTextModelWithProjection",
    "tokenizer": "words",
    "max_length": 8,
    "trainable": True,
    "config": {
        "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 8, "projection_dim": 64, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
    },
}  # fmt: skip
T5 = {
    "class_name": "UMT5EncoderModel",
    "tokenizer": "words",
    "max_length": 8,
    "trainable": True,
    "config": {
        "vocab_size": 32, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2,
        "pad_token_id": 0, "eos_token_id": 3,
    },
}  # fmt: skip
PICTURES = {
    "class_name": "SD3Transformer2DModel",
    "config": {
        "sample_size": 16, "patch_size": 1, "in_channels": 48, "out_channels": 48, "num_layers": 4,
        "attention_head_dim": 32, "num_attention_heads": 8, "joint_attention_dim": 128, "caption_projection_dim": 256,
        "pooled_projection_dim": 128, "pos_embed_max_size": 16,
    },
    "text_encoders": {"text_encoder": CLIP, "text_encoder_2": CLIP},
    "latents": {"pixel_unshuffle": 4},
}  # fmt: skip
VIDEO = {
    "class_name": "WanTransformer3DModel",
    "config": {
        "in_channels": 12, "out_channels": 12, "num_layers": 4, "num_attention_heads": 6, "attention_head_dim": 32,
        "text_dim": 64, "freq_dim": 32, "ffn_dim": 512,
    },
    "text_encoders": {"text_encoder": T5},
    "latents": {"pixel_unshuffle": 2},
}  # fmt: skip
CASES: list[tuple[str, int, str, dict[str, dict[str, Any]]]] = [
    ("one rank", 1, "text", {}),
    ("accumulation of 2", 1, "text", {"run": {"micro_batch": 2}}),
    ("full checkpointing", 1, "text", {"memory": {"activation_checkpointing": "full"}}),
    ("bfloat16", 1, "text", {"precision": {"compute": "bfloat16"}}),
    ("one rank", 1, "pictures", {}),
    ("one rank", 1, "video", {}),
    ("DDP", 2, "text", {"layout": {"dp_replicate": 2}, "run": {"micro_batch": 2}}),
    ("FSDP2", 2, "text", {"run": {"micro_batch": 2}}),
    ("FSDP2, accumulation of 2", 2, "text", {"run": {"micro_batch": 1}}),
    ("tensor parallel", 2, "text", {"layout": {"tp": 2}}),
    ("pipeline, 1F1B", 2, "text", {"layout": {"pp": 2}, "run": {"micro_batch": 1}}),
    ("context parallel, Ulysses", 2, "text", {"layout": {"cp": 2}}),
    ("FSDP2", 2, "pictures", {"run": {"micro_batch": 2}}),
    (
        "FSDP2, full checkpointing",
        2,
        "video",
        {"run": {"micro_batch": 1}, "memory": {"activation_checkpointing": "full"}},
    ),
]
"""Name, ranks, data, and what the recipe has besides."""


def recipe_of(kind: str, sections: dict[str, dict[str, Any]], folder: Path, name: str) -> Recipe:
    """A tiny recipe in float32, its run in ``folder / name``."""
    document: dict[str, Any] = {
        "precision": {"compute": "float32"},
        "optim": {"lr": 1e-4, "schedule": "constant"},
        "run": {"steps": STEPS, "global_batch": 4, "micro_batch": 4, "directory": str(folder / name), "device": "cpu"},
        "checkpoint": {"asynchronous": False},
        "metrics": {"writers": []},
    }
    match kind:
        case "text":
            document |= {"model": DECODER, "objective": {"kind": "next_token"}}
            document["data"] = {
                "kind": "jsonl_text",
                "path": str(folder / "text.jsonl"),
                "sequence_length": 256,
                "packing": False,
            }
        case "pictures":
            document |= {"model": PICTURES, "objective": {"kind": "flow_matching"}}
            document["data"] = {"kind": "image_folder", "path": str(folder / "pictures"), "resolution": 64}
        case "video":
            document |= {"model": VIDEO, "objective": {"kind": "flow_matching"}}
            document["data"] = {"kind": "video_folder", "path": str(folder / "clips"), "resolution": 32, "frames": 5}
            document["run"] |= {"global_batch": 2, "micro_batch": 2}
    for section, own in sections.items():
        document[section] = document.get(section, {}) | own
    return parse_recipe(document, source=name)


def write_data(folder: Path) -> None:
    """Random words, plain colours, and clips of them."""
    draw = random.Random(0)
    documents = (" ".join("".join(draw.choices("etaoinsh", k=5)) for _ in range(60)) for _ in range(64))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    (folder / "pictures").mkdir()
    (folder / "clips").mkdir()
    for number, colour in enumerate(COLOURS * 4):
        picture = Image.new("RGB", (64, 64), colour)
        picture.save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(colour)
        with av.open(str(folder / "clips" / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=8)
            stream.width = stream.height = 64
            for _ in range(8):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")))
            container.mux(stream.encode())
        (folder / "clips" / f"{number}.txt").write_text(colour)


def predicted(recipe: Recipe, ranks: int, cluster: Cluster) -> dict[str, Any]:
    """Step time and memory, and where the time goes."""
    prediction = predict((rehearse(recipe, ranks, role.rank) for role in roles(recipe, ranks)), cluster)
    return {
        "step_time_s": prediction.step_time_s.as_json(),
        "peak_memory_gib": prediction.as_json()["peak_memory_gib"],
        "breakdown": prediction.shares.as_json(),
        "operators": prediction.result_json()["operators"],
        "collectives": prediction.result_json()["collectives"],
    }


def measured(recipe: Recipe, ranks: int, folder: Path) -> dict[str, Any]:
    """Of a real run by ``headway train``."""
    path = folder / f"{recipe.run.directory.name}.toml"
    path.write_text(to_toml(recipe))
    command = [sys.executable, "-m", "headway.cli.main", "train", str(path), "--ranks", str(ranks)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return run_of(recipe)


def run_of(recipe: Recipe) -> dict[str, Any]:
    """What the run of ``recipe`` measured after its warm-up."""
    lines = [json.loads(line) for line in (recipe.run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time_s" in line][WARM_UPS:]
    seconds = [line["step_time_s"] - line["data_wait_s"] for line in steps]
    low, high = np.quantile(seconds, [0.25, 0.75])
    return {
        "step_time_s": median(seconds),
        "peak_memory_gib": max(line["peak_memory_gib"] for line in steps),
        "step_time_s_quartiles": [float(low), float(high)],
    }


def errors(forecast: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Percent of what was measured, and whether that lies in the range."""
    told = {}
    for what in ("step_time_s", "peak_memory_gib"):
        own = forecast[what]
        told[f"{what}_error_percent"] = 100 * (own["value"] / found[what] - 1)
        told[f"{what}_within"] = bool(own["low"] <= found[what] <= own["high"])
    return told


def summary(cases: list[dict[str, Any]], what: str) -> dict[str, float]:
    """Median and largest absolute error in percent, and the share of cases within their range."""
    sizes = [abs(case["errors"][f"{what}_error_percent"]) for case in cases]
    within = [case["errors"][f"{what}_within"] for case in cases]
    return {"median_percent": median(sizes), "largest_percent": max(sizes), "within": sum(within) / len(within)}


def clusters(folder: Path, ranks: set[int], kept: Path | None) -> dict[int, Cluster]:
    """This machine by how many ranks are busy on it; files in ``kept`` are read in place of measuring again."""
    found = {}
    for number in sorted(ranks):
        path = (kept or folder) / f"cluster-{number}.toml"
        if not path.exists():
            path.write_text(cluster_toml(calibrate(number).cluster), encoding="utf-8")
        found[number] = cluster_of(str(path))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="cases whose name or data have this in them")
    parser.add_argument("--clusters", type=Path, help="a folder of cluster files to keep between runs")
    arguments = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    chosen = [case for case in CASES if not arguments.only or arguments.only in f"{case[0]} {case[2]}"]
    report: dict[str, Any] = {"benchmark": "predicted_vs_measured", "load_before": os.getloadavg()[0], "cases": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        machines = clusters(folder, {case[1] for case in chosen}, arguments.clusters)
        for number, (layout, ranks, kind, sections) in enumerate(chosen):
            recipe = recipe_of(kind, sections, folder, f"run-{number}")
            forecast, found = predicted(recipe, ranks, machines[ranks]), measured(recipe, ranks, folder)
            case = {"layout": layout, "data": kind, "ranks": ranks, "predicted": forecast, "measured": found}
            report["cases"].append(case | {"errors": errors(forecast, found)})
            told = report["cases"][-1]["errors"]
            print(
                f"{layout}, {kind}, {ranks} ranks: {1e3 * forecast['step_time_s']['value']:.0f} ms predicted, "
                f"{1e3 * found['step_time_s']:.0f} measured ({told['step_time_s_error_percent']:+.0f} %); "
                f"{forecast['peak_memory_gib']['value']:.3f} GiB, {found['peak_memory_gib']:.3f} "
                f"({told['peak_memory_gib_error_percent']:+.0f} %)",
                flush=True,
            )
    report |= {what: summary(report["cases"], what) for what in ("step_time_s", "peak_memory_gib")}
    print(json.dumps({what: report[what] for what in ("step_time_s", "peak_memory_gib")}))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
