"""Layouts a second of ``headway plan``'s analytic pass, on one core, in processor time.

The pass enumerates, checks and ranks all layouts, micro-batches and policies of Llama 3.1 8B on 64 and on 1,024 H100s.
Rehearsals of blocks, which it is made from, are counted apart: their number does not grow with the devices.

python benchmarks/planner_speed.py [--json PATH]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from headway.cluster import cluster_named
from headway.plan.search import analyse_all
from headway.recipe import Recipe, parse_recipe

DEVICES = (64, 1024)


def recipe() -> Recipe:
    """Llama 3.1 8B by its config, 1,024 sequences of 8,192 tokens a step."""
    config = {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    }  # fmt: skip
    document = {
        "model": {"class_name": "LlamaForCausalLM", "tokenizer": "bytes", "config": config},
        "objective": {"kind": "next_token"},
        "data": {"kind": "jsonl_text", "path": "text.jsonl", "sequence_length": 8192},
        "run": {"steps": 1, "global_batch": 1024, "micro_batch": 1},
    }
    return parse_recipe(document, "benchmark")


def measured(devices: int) -> dict[str, Any]:
    """One search."""
    began = time.process_time()
    found = analyse_all(recipe(), cluster_named("dgx-h100"), [devices], clock=time.process_time)
    return {
        "devices": devices,
        "layouts": len(found.candidates),
        "analytic_s": found.seconds,
        "layouts_per_s": len(found.candidates) / found.seconds,
        "rehearsals": found.rehearsals,
        "rehearsing_s": found.rehearsing_seconds,
        "whole_s": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measured(devices) for devices in DEVICES]
    for row in results:
        print(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
