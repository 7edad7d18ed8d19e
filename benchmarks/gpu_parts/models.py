"""Training steps of a language model and of a Flux-like transformer, fused and not: tokens/s, MFU, memory, a trace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from gpu_parts.device import facts, seconds_of

STEPS = 8
SOME: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
QWEN3_1_7B = SOME | {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
QWEN3_TINY = SOME | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FLUX_LIKE: dict[str, Any] = {"num_layers": 4, "num_single_layers": 8}
FLUX_TINY: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "in_channels": 16,
    "axes_dims_rope": [4, 6, 6],
}


@dataclass(frozen=True)
class Task:
    """A model in bfloat16, made anew each time, and the loss of a micro-batch of so many tokens."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    tokens: int

    def flops(self) -> int:
        """Of the products and attention of a step, forward and backward, without what is computed again."""
        with FlopCounterMode(display=False) as counter:
            self.loss(self.model()).backward()
        return int(counter.get_total_flops())


def run(device: torch.device, dry: bool, add: Callable[[dict[str, Any]], None], folder: Path) -> None:
    """A row for each model, fused and not, and what stands in the way of those that can't be made here."""
    peak = (facts(device)["dense_peak_tflops"] or {}).get("bfloat16")
    for make in (_language_model, _flux_like):
        try:
            task = make(device, dry)
        except ImportError as error:
            add({"model": make.__name__.strip("_"), "reason": f"{error}: bring it as a wheel on PYTHONPATH"})
            continue
        flops = task.flops()
        for fused in (False, True):
            try:
                row = _measured(task, device, fused=fused, dry=dry, folder=folder)
                achieved = flops / row["step_s"]
                add(row | {"model_tflop": flops / 1e12, "mfu": achieved / (peak * 1e12) if peak else None})
            except Exception as error:  # the other way is measured all the same
                add({"model": task.name, "fused": fused, "error": f"{type(error).__name__}: {error}"[:300]})


def _measured(task: Task, device: torch.device, *, fused: bool, dry: bool, folder: Path) -> dict[str, Any]:
    from headway.kernels.fusion import fuse

    model = task.model()
    told = fuse(model).summary() if fused else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        task.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = median(seconds_of([step], device, 0.0) for _ in range(1 if dry else STEPS))
    name = f"{task.name.replace(' ', '-')}-{'fused' if fused else 'plain'}.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    ) as trace:
        step()
    trace.export_chrome_trace(str(folder / name))
    return {
        "model": task.name,
        "fused": fused,
        "fusion": told,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": seconds,
        "tokens_per_s": task.tokens / seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "trace": name,
    }


def _language_model(device: torch.device, dry: bool) -> Task:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    samples, length = (1, 32) if dry else (4, 2048)
    config = Qwen3Config(**(QWEN3_TINY if dry else QWEN3_1_7B))
    tokens = torch.randint(config.vocab_size, (samples, length), device=device)

    def model() -> nn.Module:
        with torch.device(device):
            return Qwen3ForCausalLM(config).to(torch.bfloat16)

    def loss(model: nn.Module) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Task("Qwen3 1.7B", model, loss, samples * length)


def _flux_like(device: torch.device, dry: bool) -> Task:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    samples, side, words = (1, 4, 8) if dry else (4, 64, 512)

    def model() -> nn.Module:
        with torch.device(device):
            return FluxTransformer2DModel(**(FLUX_TINY if dry else FLUX_LIKE)).to(torch.bfloat16)

    with torch.device("meta"):
        config = FluxTransformer2DModel(**(FLUX_TINY if dry else FLUX_LIKE)).config
    with torch.device(device):
        pixels = torch.randn(samples, side * side, config.in_channels, dtype=torch.bfloat16)
        text = torch.randn(samples, words, config.joint_attention_dim, dtype=torch.bfloat16)
        pooled = torch.randn(samples, config.pooled_projection_dim, dtype=torch.bfloat16)
        rows, columns = (grid.flatten() for grid in torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij"))
        places = torch.stack([torch.zeros_like(rows), rows, columns], 1).float()
        times, no_places = torch.full((samples,), 0.5, dtype=torch.bfloat16), torch.zeros(words, 3)

    def loss(model: nn.Module) -> Tensor:
        predicted = model(
            hidden_states=pixels, encoder_hidden_states=text, pooled_projections=pooled, timestep=times,
            img_ids=places, txt_ids=no_places, guidance=None, return_dict=False,
        )[0]  # fmt: skip
        return (predicted.float() - pixels.float()).square().mean()

    return Task("Flux-like transformer", model, loss, samples * (side * side + words))
