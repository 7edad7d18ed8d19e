"""Fused attention, forward and backward, by head size and length."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from headway.calibrate.bench import Bench
from headway.calibrate.effort import Effort
from headway.calibrate.fit import fitted, ranged, rounded
from headway.cost import visible_share

BACKWARD_PRODUCTS = 2.5
"""As ``headway.cost.attention`` counts them."""
HEAD_SIZES = {"cpu": (16, 32, 64, 128), "cuda": (64, 128)}
HEADS = {"cpu": (2, 4), "cuda": (2, 16)}
"""Samples and heads."""
LONGER, TILED_HEAD_SIZE = 4, 64
"""By how much what tells of the tiles is longer than the rest: a mask hides nothing of a single tile."""


@dataclass(frozen=True)
class AttentionTime:
    """Of one pass over ``samples · heads`` times ``keys`` queries and keys."""

    head_size: int
    heads: int
    keys: int
    causal: bool
    backward: bool
    seconds: float
    call: float = 0.0
    """Of them, the calls of operators: the host's; 0 on a device."""

    def seen(self, tile_keys: float) -> float:
        """Keys that the mean query is multiplied with, as ``headway.cost.visible_share`` has it."""
        return self.keys * float(visible_share(self.keys, self.keys, tile_keys)) if self.causal else float(self.keys)

    def flops(self, tile_keys: float) -> float:
        """What the kernel skips left out."""
        each = 4.0 * self.heads * self.keys * self.seen(tile_keys) * self.head_size
        return each * (BACKWARD_PRODUCTS if self.backward else 1)


def measure_attention(bench: Bench, effort: Effort) -> list[AttentionTime]:
    """Lengths from the longest down by halves, causal and not."""
    nothing = dict.fromkeys((False, True), 0.0)
    if bench.device.type == "cpu":
        nothing = {backward: _time(bench, 16, 1, False, backward).seconds for backward in (False, True)}
    lengths = [effort.longest_sequence // part for part in (1, 2, 4, 8)]
    long = LONGER * effort.longest_sequence
    found = [_time(bench, TILED_HEAD_SIZE, long, causal, False) for causal in (False, True)]
    for head_size in HEAD_SIZES[bench.device.type]:
        for keys in lengths:
            for causal in (False, True):
                for backward in (False, True):
                    time = _time(bench, head_size, keys, causal, backward)
                    found.append(replace(time, call=min(nothing[backward], time.seconds)))
    return found


def attention_rates(times: list[AttentionTime], peak_tflops: float, source: str) -> dict[str, Any]:
    """A kernel of ``achieved.attention``; ``peak_tflops``: the dense bfloat16 peak, of which efficiencies are shares.

    ``t = flops / (peak · e) + (s0 / (peak · e)) · flops / keys``, with one s0 of all head sizes and passes.
    """
    tile = _tile_keys(times)
    halves = []
    for own in _series(times).values():
        flops = [time.flops(tile) for time in own]
        shallow = [some / time.seen(tile) for some, time in zip(flops, own, strict=True)]
        per_flop, per_short = fitted(flops, [time.seconds for time in own], shallow, [time.call for time in own])
        halves.append(per_short / per_flop)
    half = sorted(halves)[len(halves) // 2]
    passes: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    for (head_size, backward), own in _series(times).items():
        seconds = [time.seconds for time in own]
        work = [time.flops(tile) * (1 + half / time.seen(tile)) for time in own]
        calls = [time.call for time in own]
        per_flop, _ = fitted(work, seconds, [0.0] * len(work), calls)
        modelled = [call + per_flop * some for call, some in zip(calls, work, strict=True)]
        rate = 1 / (per_flop * peak_tflops * 1e12)
        passes[backward][head_size] = ranged(rate, seconds, modelled)
    return {
        "forward": passes[False],
        "backward": passes[True],
        "half_keys": rounded(half),
        "rows_per_processor": 0,
        "tile_keys": tile,
        "source": source,
    }


def _tile_keys(times: list[AttentionTime]) -> float:
    """By how much of the whole time the longest sequences take under a causal mask: half, and half a tile more."""
    longest = max(time.keys for time in times)
    whole, causal = (
        [time.seconds for time in times if time.keys == longest and time.causal == masked and not time.backward]
        for masked in (False, True)
    )
    hidden = 1 - sum(causal) / sum(whole)
    return rounded(min(max(longest - 2 * longest * hidden, 1.0), longest))


def _series(times: list[AttentionTime]) -> dict[tuple[int, bool], list[AttentionTime]]:
    found: dict[tuple[int, bool], list[AttentionTime]] = {}
    for time in times:
        found.setdefault((time.head_size, time.backward), []).append(time)
    return found


def _time(bench: Bench, head_size: int, keys: int, causal: bool, backward: bool) -> AttentionTime:
    samples, heads = HEADS[bench.device.type]
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    query, key, value = (
        torch.randn(samples, heads, keys, head_size, device=bench.device, dtype=dtype, requires_grad=backward)
        for _ in range(3)
    )
    if backward:
        out = scaled_dot_product_attention(query, key, value, is_causal=causal)
        gradient = torch.randn_like(out)
        seconds = bench.seconds_of(lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True))
    else:
        seconds = bench.seconds_of(lambda: scaled_dot_product_attention(query, key, value, is_causal=causal))
    return AttentionTime(head_size, samples * heads, keys, causal, backward, seconds)
