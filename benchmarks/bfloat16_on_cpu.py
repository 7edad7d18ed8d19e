"""bfloat16 on a processor without bfloat16 instructions: PyTorch's own products against float32 ones rounded once.

Two processes, one with and one without the emulation, take turns; both also measure float32. Medians and ratios.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.parallel import emulate_bfloat16_products, has_bfloat16_instructions

ROUNDS = 15
TOKENS, WIDTH, HEADS = 2304, 128, 4


def linear(dtype: torch.dtype) -> Callable[[], Any]:
    """Forward and backward of one projection of 2,304 tokens."""
    layer = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype)
    tokens = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return lambda: layer(tokens).sum().backward()


def attention(dtype: torch.dtype) -> Callable[[], Any]:
    """Forward and backward of attention over 32 sequences of 72 tokens."""
    heads = torch.randn(32, HEADS, 72, WIDTH // HEADS, dtype=dtype, requires_grad=True)
    return lambda: functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()


def block(dtype: torch.dtype) -> Callable[[], Any]:
    """Forward and backward of a whole transformer block."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, dtype=dtype)
    tokens = torch.randn(32, 72, WIDTH, dtype=dtype)

    def run() -> Tensor:
        loss = layer(tokens).float().square().sum()
        loss.backward()
        return loss

    return run


CASES = {"linear": linear, "attention": attention, "transformer block": block}


def serve(pipe: Connection, emulated: bool) -> None:
    """Time whatever case is asked for, once a message."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if emulated:
        emulate_bfloat16_products()
    ready = {(name, dtype): make(getattr(torch, dtype)) for name, make in CASES.items() for dtype in DTYPES}
    while (asked := pipe.recv()) is not None:
        began = time.perf_counter()
        ready[asked]()
        pipe.send(time.perf_counter() - began)


DTYPES = ("float32", "bfloat16")


def measure() -> dict[str, Any]:
    """Seconds of each case: float32, bfloat16 as PyTorch has it, bfloat16 emulated."""
    pipes: dict[bool, Connection] = {}
    for emulated in (False, True):
        pipes[emulated], theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=serve, args=(theirs, emulated), daemon=True).start()

    def seconds(emulated: bool, name: str, dtype: str) -> float:
        pipes[emulated].send((name, dtype))
        return pipes[emulated].recv()

    rows = []
    for name in CASES:
        kinds = {"float32": (False, "float32"), "pytorch": (False, "bfloat16"), "emulated": (True, "bfloat16")}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(ROUNDS + 2):
            for kind, (emulated, dtype) in kinds.items():
                taken = seconds(emulated, name, dtype)
                if number >= 2:
                    times[kind].append(taken)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        rows.append(
            {
                "case": name,
                **{f"{kind}_ms": 1e3 * value for kind, value in medians.items()},
                "pytorch_over_emulated": medians["pytorch"] / medians["emulated"],
                "emulated_over_float32": medians["emulated"] / medians["float32"],
            }
        )
    for pipe in pipes.values():
        pipe.send(None)
    return {"torch": torch.__version__, "bfloat16_instructions": has_bfloat16_instructions(), "rows": rows}


def main() -> None:
    """Measure and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure()
    for row in result["rows"]:
        print(
            f"{row['case']:18} float32 {row['float32_ms']:7.2f} ms  PyTorch bfloat16 {row['pytorch_ms']:7.2f} ms  "
            f"emulated {row['emulated_ms']:7.2f} ms  ({row['pytorch_over_emulated']:.1f} x faster than PyTorch's)"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
